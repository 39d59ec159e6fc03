"""A user's rows: files, tokenizer, chat template, and the token ids made of them. Torch-free.

Batches on the ranks are in rlhf_tasks/parallel/batch.
"""
