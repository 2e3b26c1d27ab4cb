"""Doors for the libraries that own the training loop: each finds the model, hands over a plan, and nothing else.

    torch_recompute.integrations.huggingface    transformers, its Trainer, PEFT, TRL
    torch_recompute.integrations.lightning      Lightning and Fabric

`policies.py` makes a plan from what fits into a configuration file. What keeps a plan right in a model of another
library, whichever way it came there, is the business of `plan.apply`. `import torch_recompute` loads none of these.
"""
