"""One call of a region: what it may depend on, its forward and replays, saved calls, and its slots in autograd's graph.

`taken.py` notes what a region is called with and what its function holds. `guards.py` has a guard for each thing that a
replay must find as the forward did, `modules.py` that of modules; `exchange.py` writes what differs into users'
objects, and writes it back.

`region_call.py` runs a region's function, in forward and in backward; `saved_call.py` the calls inside it that are not
repeated. A `Slot` (`slots.py`) holds the place of a dropped tensor in the graph, `views.py` rebuilds views,
`shape_only.py` makes tensors whose values nothing reads, `mismatch.py` shows where a replay differs from its forward.
`discard.py` drops a region's output after its consumer has run, `tiles.py` makes one region per tile of tokens,
`elastic.py` keeps what a region computes while memory lasts.

The engine knows nothing of plans, settings or process groups: an `Observer` sees regions run, a `Store` holds what they
keep, an `Ambient` is state that a replay must find as the forward did.
"""
