"""Lower bounds on the period of every plan that completes a partial choice, and the tree search that uses them.

search/branch_and_bound calls the tree search.
"""
