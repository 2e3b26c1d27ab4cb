"""The command `torch-recompute`: one file per command.

`cli.py` is the parser and the exit codes. `plan.py`, `show.py`, `verify.py`, `doctor.py`, `report.py`, `bench.py` and
`demo.py` are the commands. Each has `add_command`, which describes it to `argparse`, and the `command` that runs it and
returns the exit code.

What they share: `output.py`, how a result is printed, drawn and written; `models.py`, from the word MODEL to a model
and a batch; `small_models.py`, three models that run where nothing else is installed.
"""
