"""One call of a region: forward, replay, saved calls, and its slots in autograd's graph.

`region_call.py` runs a region's function, in forward and in backward; `saved_call.py` the calls inside it that are not
repeated. `slots.py` is what stands in the graph for a tensor that was dropped, `inputs.py` what the region keeps of its
arguments, `shape_only.py` a tensor whose values nothing reads. `backward_task.py` knows which backward call runs,
`mismatch.py` what shows where a replay differs from its forward. `discard.py` drops a region's output after its
consumer has run, `tiles.py` makes one region per tile of tokens.

The engine knows nothing of plans, settings or process groups: an `Observer` sees regions run, a `Store` holds what they
keep, an `Ambient` is what a replay must find as the forward did.
"""
