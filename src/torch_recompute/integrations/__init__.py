"""Integrations with the libraries that own the training loop.

    torch_recompute.integrations.huggingface    transformers, its Trainer, PEFT, TRL
    torch_recompute.integrations.lightning      Lightning and Fabric

`policies.py` makes a plan from what fits into a configuration file; `plan.apply` keeps it right in a model of another
library. `import torch_recompute` loads none of these.
"""
