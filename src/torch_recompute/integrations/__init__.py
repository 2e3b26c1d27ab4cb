"""Doors for the libraries that own the training loop: each finds the model, hands over a plan, and nothing else.

    torch_recompute.integrations.huggingface    transformers, its Trainer, PEFT, TRL
    torch_recompute.integrations.lightning      Lightning and Fabric

`policies.py` makes a plan from what fits into a configuration file, `switch.py` keeps a plan when a framework turns on
its own checkpointing, `caches.py` lets a region be replayed that writes into a cache of keys and values.
`import torch_recompute` loads none of them.
"""
