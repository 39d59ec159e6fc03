"""What runs on the Dask workers: protocol, controller, ranks, engines, algorithms; and what all layers share.

`spec` has the words of all layers: calls, plan nodes, plans. Flows, plans' search and prices are not here.
"""
