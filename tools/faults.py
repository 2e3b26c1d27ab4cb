"""The faults that `plant_faults.py` plants: one line each, as a careless change would leave it.

A row is chosen by somebody who has read the package and no test, so that what catches it says something of the tests.
The changed line is one that runs, and a user would feel it: another gradient, bytes that stay, a promise that does not
hold, an error that does not come. Nothing here breaks the import or every use.

`old` occurs once in its file. Where code moves, the row moves with it: `tests/project/test_planted_faults.py` holds
each row to the source.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault.

    Attributes:
        name: Names the row on the command line.
        file: The file, below `src/torch_recompute`.
        old: The text that is replaced.
        new: The fault.
        breaks: What a user would feel.
        tests: Where it should be seen: files and folders below `tests`, in the order in which they run.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str


FAULTS = (
    # --- engine/, region.py ---
    Fault(
        "generator-after-replay",
        "engine/guards.py",
        "_set_cpu_state(now)",
        "_set_cpu_state(self._cpu)",
        "after a replay the generator stands where the forward began: the next step draws the same numbers again",
        "laws/test_law_05_random_numbers.py laws/test_law_05_world.py core/test_state.py",
    ),
    Fault(
        "frozen-bias-changed",
        "engine/modules.py",
        "found = [*filter(_is_there, _flat(map(_values_of, parameters)))]",
        "found = [w for w in filter(_is_there, _flat(map(_values_of, parameters))) if w.requires_grad]",
        "a frozen bias is changed in place before backward: a wrong gradient, silently",
        "laws/test_law_05_changes.py laws/test_law_05_modules.py core/test_modules.py core/test_state.py",
    ),
    Fault(
        "generators-of-two-threads",
        "engine/guards.py",
        "thread.is_alive() for thread in threads) > 1",
        "thread.is_alive() for thread in threads) < 1",
        "a replay on one thread sets the generator that a forward on another draws from: dropout differs",
        "laws/test_law_11_threads.py core/test_modules.py",
    ),
    Fault(
        "box-is-not-put-back",
        "engine/taken.py",
        "exchange.want(there, inside, content)",
        "exchange.objects[id(self)] = there",
        "a list or an object among the arguments has the entries of backward in the replay: a wrong gradient, silently",
        "core/test_taken.py laws/test_never_worse.py laws/test_law_05_changes.py",
    ),
    Fault(
        "exchange-is-not-undone",
        "engine/exchange.py",
        "self._found = [Wanted(owner, inside, entries_of(inside), order) for owner",
        "self._found = [Wanted(owner, inside, inside, order) for owner",
        "after a replay a list, an object or a module holds what it held in the forward: what was set since is lost",
        "core/test_taken.py laws/test_never_worse.py laws/test_law_05_modules.py",
    ),
    Fault(
        "owner-is-not-released",
        "engine/exchange.py",
        "for key in self._keys:\n                        del OWNED[key]",
        "for key in ():\n                        del OWNED[key]",
        "a thread that has put something back for a replay has it ever after: another thread waits for ever",
        "core/test_taken.py laws/test_law_11_threads.py",
    ),
    Fault(
        "values-stay-put-back",
        "state/__init__.py",
        "        _put(before)\n        set_versions(versions)",
        "        set_versions(versions)",
        "after backward a BatchNorm's statistics are those from before its forward: batches are not counted",
        "core/test_modules.py laws/test_law_05_modules.py laws/test_never_worse.py",
    ),
    Fault(
        "slot-shares-memory",
        "engine/region_call.py",
        "if self._memories and storage_id(rebuilt) in self._memories:",
        "if self._memories and id(rebuilt) in self._memories:",
        "a buffer that autograd saved in a replay holds other values by the time it is read: a wrong gradient",
        "core/test_state.py laws/test_law_05_changes.py laws/test_law_05_modules.py",
    ),
    Fault(
        "generator-stands-elsewhere",
        "engine/guards.py",
        "return None if _torch.holds_bytes(now, self._undrawn) else _torch.write_bytes(now, self._undrawn)",
        "return None",
        "a region that draws within fork_rng draws other numbers in its replay: a wrong gradient, silently",
        "laws/test_law_05_random_numbers.py laws/test_never_worse.py",
    ),
    Fault(
        "written-cell-is-a-copy",
        "engine/taken.py",
        "if (now is not content or id(cell) in written) and not _leads_on(now, set()):",
        "if (now is not content or id(cell) in written) and _leads_on(now, set()):",
        "a replay does not see what a hook writes to a variable of the region's function: a wrong gradient",
        "core/test_taken.py laws/test_never_worse.py",
    ),
    Fault(
        "module-is-written-to-before-its-call",
        "engine/modules.py",
        "self._written = range(self._since, version_of_dict({}))",
        "self._written = range(0)",
        "a replay begins with what the function had set in a module before its call: a wrong gradient, silently",
        "laws/test_never_worse.py",
    ),
    Fault(
        "early-contents-are-held",
        "engine/modules.py",
        "self._early = {}  # which holds",
        "pass  # which holds",
        "a result that a function sets in a module before it calls it is held by the region, and leaks",
        "laws/test_law_08_no_leaks.py",
    ),
    Fault(
        "function-is-another-object",
        "engine/taken.py",
        "if made is not None and _holds(made, contents, defaults, keywords):",
        "if made is not None and False:",
        "a function in a closure is another object in the replay: a table that it is a key of has it no more",
        "core/test_taken.py laws/test_never_worse.py",
    ),
    Fault(
        "threads-write-one-tensor",
        "engine/taken.py",
        "changed = self._flat._version != self._version",
        "changed = False",
        "replays on two threads write to one tensor of a closure at once: it keeps old values ever after",
        "laws/test_never_worse.py",
    ),
    Fault(
        "called-module-is-not-noted",
        "engine/modules.py",
        "return id(module) in self._below",
        "return id(module) in self._seen",
        "a module that a region holds and calls is read alone: what is below it is not put back, and counts twice",
        "core/test_modules.py laws/test_never_worse.py laws/test_law_05_modules.py",
    ),
    Fault(
        "rebuilt-tensor-stays",
        "engine/region_call.py",
        '"""Empties every slot at the end of a backward call."""\n        self.release()',
        '"""Empties every slot at the end of a backward call."""',
        "after a partial backward that retains its graph, all that was rebuilt stays: the memory of a plain step",
        "laws/test_law_08_no_leaks.py laws/test_law_03_one_graph_task.py laws/test_law_06_early_stop.py",
    ),
    Fault(
        "stop-before-kernel",
        "engine/region_call.py",
        "if finished or (differentiable and self._unfinished != sequence_number()) or self._is_whole():",
        "if finished or differentiable or self._is_whole():",
        "a replay ends before the kernel that fills a buffer it has saved (RReLU's noise): a wrong gradient",
        "laws/test_law_06_early_stop.py laws/test_law_01_gradients.py laws/test_random_programs.py",
    ),
    Fault(
        "read-slot-stays",
        "engine/slots.py",
        "self.content = weakref.ref(tensor) if in_backward() else None",
        "self.content = tensor",
        "with retain_graph=True all that a replay rebuilds stays to the end of backward: the peak of a plain step",
        "laws/test_law_08_no_leaks.py laws/test_law_06_early_stop.py laws/test_law_03_one_graph_task.py",
    ),
    Fault(
        "last-output-stays",
        "state/tape.py",
        "self.entries[max(self.reach, 0) :]",
        "self.entries[max(self.reach, 0) + 1 :]",
        "the output of a region's last saved call, which no replay gets as far as, is kept in every layer",
        "core/test_dropped_outputs.py laws/test_law_06_early_stop.py laws/test_law_08_no_leaks.py "
        "plans/test_kept_calls.py",
    ),
    Fault(
        "view-for-its-base",
        "engine/saved_call.py",
        "place = WHOLE if tensor is base else geometry(tensor, base)",
        "place = WHOLE if tensor.shape == base.shape else geometry(tensor, base)",
        "a saved call that transposes a square input has it back as it was, not transposed: a wrong gradient",
        "laws/test_law_01_one_tensor_many_names.py laws/test_law_01_gradients.py core/test_views.py "
        "laws/test_random_programs.py",
    ),
    Fault(
        "state-for-generators",
        "region.py",
        "options = Options(label, inputs, (*DEFAULT, *given), check, early_stop",
        "options = Options(label, inputs, tuple(given) or DEFAULT, check, early_stop",
        "state=[NumpyRng()] takes the place of PyTorch's generators: dropout in the region differs in the replay",
        "core/test_state.py laws/test_law_05_random_numbers.py laws/test_law_05_world.py",
    ),
    # --- state/ ---
    Fault(
        "numbers-of-saved-calls",
        "state/__init__.py",
        "for (ambient, now), old in zip(after, before, strict=True)",
        "for (ambient, old), now in zip(after, before, strict=True)",
        "what a saved call has drawn is drawn again by what follows it in the replay: dropout differs",
        "laws/test_law_05_random_numbers.py core/test_state.py core/test_values.py plans/test_kept_calls.py",
    ),
    Fault(
        "statistics-go-back",
        "engine/modules.py",
        "and not (training and _is_small(tensor)):",
        "and True:",
        "running statistics of a BatchNorm are updated twice: its kernel does not raise their versions",
        "laws/test_law_01_gradients.py laws/test_law_05_world.py core/test_modules.py",
    ),
    Fault(
        "another-calls-record",
        "state/tape.py",
        "if not isinstance(found, kind) or found.name != name:",
        "if not isinstance(found, kind) and found.name != name:",
        "a replay that takes another branch is given the result of another saved call, without an error",
        "laws/test_law_09_mismatch.py core/test_values.py laws/test_law_07_nesting.py",
    ),
    Fault(
        "inner-observer-alone",
        "state/observer.py",
        "here.observers = Observers((*(() if before is None else before.each), *observers))",
        "here.observers = Observers(observers)",
        "who watches a step no longer sees the regions that something inside watches too: figures are missing",
        "core/test_observer.py plans/test_applied_report.py memory/test_measure.py",
    ),
    # --- stores/ ---
    Fault(
        "changed-before-put",
        "stores/store.py",
        "self._versions = self._versions[0], version_of(self._tensor)",
        "self._versions = version_of(self._tensor), version_of(self._tensor)",
        "what a saved call changes in place after autograd has saved it is stored changed: a wrong gradient, silently",
        "core/test_stores.py core/test_offload.py core/test_disk.py",
    ),
    Fault(
        "room-for-one-less",
        "stores/host.py",
        "self._bytes + copied > self.at_most",
        "self._bytes + copied >= self.at_most",
        "a tensor that exactly fills at_most= stays on the device",
        "core/test_offload.py core/test_stores.py core/test_disk.py",
    ),
    Fault(
        "one-more-leaving",
        "stores/transfers.py",
        "while len(mine.leaving) > ahead:",
        "while len(mine.leaving) > ahead + 1:",
        "what one more region has sent than ahead= says stays on the device: a higher peak",
        "core/test_offload.py core/test_disk.py planner/test_host_memory.py",
    ),
    Fault(
        "read-before-it-is-there",
        "stores/disk.py",
        '"""Waits until all is read."""\n        _wait(mark.blocks)',
        '"""Waits until all is read."""',
        "backward goes on while its tensors are still read from the disk, and errors of reading are lost",
        "core/test_disk.py",
    ),
    # --- memory/ ---
    Fault(
        "rounded-down",
        "memory/ledger.py",
        "entry.exact, nbytes = exact, -(-exact // self._rounding) * self._rounding",
        "entry.exact, nbytes = exact, exact // self._rounding * self._rounding",
        "a simulation for CUDA counts no part of a block that is smaller than 512 bytes: the peak is too low",
        "memory/test_simulate.py memory/test_measure.py planner/test_predicted_peak.py",
    ),
    Fault(
        "one-mebibyte-apart",
        "memory/reserved.py",
        "self._small if size <= _MIB else self._large",
        "self._small if size < _MIB else self._large",
        "tensors of exactly 1 MiB are put into the wrong segments: the reserved memory is not that of the allocator",
        "memory/test_reserved.py",
    ),
    Fault(
        "slack-does-nothing",
        "memory/elastic.py",
        "return round(self.limit * (1 - self.slack))",
        "return self.limit",
        "Elastic(slack=) leaves nothing free under the limit",
        "memory/test_elastic.py core/test_elastic_regions.py laws/test_elastic.py",
    ),
    Fault(
        "accumulated-gradients",
        "memory/loop.py",
        "return self.accumulate > 1 or not self.set_to_none",
        "return self.accumulate > 1 and not self.set_to_none",
        "with accumulate=4 the gradients of earlier microbatches are not counted in forward: the peak is too low",
        "memory/test_simulate.py memory/test_closed_forms.py planner/test_predicted_peak.py",
    ),
    # --- simulation/ ---
    Fault(
        "one-storage-counted-twice",
        "simulation/copies.py",
        "identity, whole = _torch.storage_id(tensor), tensor.untyped_storage()",
        "identity, whole = id(tensor), tensor.untyped_storage()",
        "weights that are views of one memory count once each: the peak is too high",
        "memory/test_simulate.py planner/test_odd_models.py planner/test_predicted_peak.py",
    ),
    Fault(
        "gradients-nobody-clears",
        "simulation/step.py",
        "(self._optimizer or self._model).zero_grad()",
        "self._model.zero_grad()",
        "gradients of weights that the optimizer does not hold are not counted: the peak is too low",
        "memory/test_optimizer_states.py memory/test_simulate.py planner/test_predicted_peak.py",
    ),
    Fault(
        "states-on-the-host",
        "simulation/step.py",
        "host_bytes=max(part.on(APART).peak_bytes for part in self._parts)",
        "host_bytes=first.on(APART).peak_bytes",
        "of an optimizer in host memory only the gradients count: the states there are left out",
        "memory/test_optimizer_states.py planner/test_configurations.py planner/test_host_memory.py "
        "commands/test_states_options.py",
    ),
    # --- planner/ ---
    Fault(
        "budget-met-exactly",
        "planner/solve.py",
        'side="right"',
        'side="left"',
        "a choice that takes exactly the budget is passed over, and the least budget is answered by a plan above it",
        "planner/test_solver.py planner/test_make_plan.py laws/test_planner.py",
    ),
    Fault(
        "bound-too-high",
        "planner/bound.py",
        "(1 - s) * rest for s in SHARES",
        "rest for s in SHARES",
        "the lower bound is above what a plan reaches, and plans are called optimal that are not",
        "planner/test_lower_bound.py planner/test_solver.py laws/test_planner.py",
    ),
    Fault(
        "changed-results-are-kept",
        "planner/evaluate.py",
        "self._walk.refused |= call.is_changed",
        "self._walk.refused |= False",
        "a plan is offered calls whose results the model changes in place, each of which costs a round of planning",
        "laws/test_recorded_step.py",
    ),
    Fault(
        "copies-are-free",
        "planner/evaluate.py",
        "region.passing.append(self.new(passing))",
        "self.drop(self.new(passing))",
        "the forward of a region is thought to take less than it does where modules hold large buffers",
        "laws/test_recorded_step.py",
    ),
    Fault(
        "a-kept-context",
        "planner/record.py",
        "self._made_in_forward.difference(tape.results)",
        "()",
        "layers that leave tensors behind in each replay are priced as if they did not",
        "laws/test_recorded_step.py",
    ),
    Fault(
        "offload-for-free",
        "planner/step_options.py",
        "seconds = here.seconds + wait",
        "seconds = here.seconds",
        "waiting for host memory costs nothing in a plan, so slow links are chosen before quick replays",
        "planner/test_host_memory.py planner/test_make_plan.py",
    ),
    Fault(
        "running-half-twice",
        "planner/schedules.py",
        "self.action.kind in (BACKWARD, INPUTS)",
        "self.action.kind == BACKWARD",
        "under zero-bubble schedules the running microbatch counts twice: the peak of a rank is too high",
        "planner/test_schedules.py planner/test_stages.py planner/test_ranks.py",
    ),
    Fault(
        "frozen-since-the-last-plan",
        "planner/plan_file.py",
        "layout = [(name, str(t.dtype), list(t.shape), t.requires_grad) for name, t in tensors]",
        "layout = [(name, str(t.dtype), list(t.shape)) for name, t in tensors]",
        "after layers are frozen, auto(cache=) applies the plan from before",
        "planner/test_first_call.py",
    ),
    # --- plan/ ---
    Fault(
        "replica-left-behind",
        "plan/wrappers.py",
        "if here.get(REPLICATE) == self.replica:",
        "if here.get(REPLICATE) is self.replica:",
        "after handle.remove() every module still has an attribute of the plan, and nn.DataParallel fails",
        "plans/test_apply.py plans/test_units.py",
    ),
    Fault(
        "norm-behind-the-mlp",
        "plan/labels.py",
        "norms[len(norms) // 2 if mlp else 0]",
        "norms[-1 if mlp else 0]",
        "where layers have norms on both sides, offloading mlp_norm takes the one behind the MLP",
        "plans/test_labels.py plans/test_megatron_settings.py",
    ),
    Fault(
        "dropout-by-position",
        "plan/calls.py",
        'pure = not (args[4] if len(args) > 4 else kwargs.get("dropout_p"))',
        'pure = not kwargs.get("dropout_p")',
        "a kept attention whose dropout is given by position leaves the generator behind: later dropout differs",
        "plans/test_kept_calls.py plans/test_labels.py laws/test_law_05_random_numbers.py",
    ),
    # --- compat/ ---
    Fault(
        "early-stop-of-torch",
        "compat/torch_utils.py",
        "early_stop=early_stop if stop is None else stop",
        "early_stop=early_stop if not stop else stop",
        "torch's set_checkpoint_early_stop(False) has no effect",
        "compat/test_checkpoint.py compat/test_checkpoint_in_libraries.py",
    ),
    # --- further rows ---
    Fault(
        "last-tile-is-shorter",
        "engine/tiles.py",
        "bounds = [(size * tile // count, size * (tile + 1) // count) for tile in range(count)]",
        "bounds = [(size // count * tile, size // count * (tile + 1)) for tile in range(count)]",
        "tokens that do not divide into equal tiles are left out of the result and of the gradients",
        "core/test_tiles.py",
    ),
    Fault(
        "changed-output-is-dropped",
        "engine/discard.py",
        "if tensor._version != then:",
        "if tensor._version < then:",
        "an output that was changed in place is dropped and rebuilt as it was: its consumer's gradient is wrong",
        "compat/test_output_discard.py core/test_dropped_outputs.py",
    ),
    Fault(
        "split-of-now",
        "memory/measurement.py",
        "by_category=by_category(ledger.at_peak()),",
        "by_category=by_category(ledger.alive()),",
        "the categories of a measured peak are those of what is alive now, and do not sum to the peak",
        "memory/test_measure.py",
    ),
    Fault(
        "plan-that-is-gone",
        "plan/apply.py",
        "planned_models.pop(self.model, None)",
        "planned_models.get(self.model, None)",
        "a model whose plan was removed still counts as planned: what asks for its plan finds one that is gone",
        "plans/test_apply.py plans doctor",
    ),
    Fault(
        "versions-of-weights",
        "memory/saved.py",
        "self._versions = versions_of([*buffers, *self._weights])",
        "self._versions = versions_of(buffers)",
        "a real step that planning times raises the versions of weights: a backward that was begun before it fails",
        "planner/test_no_side_effects.py memory/test_saved_activations.py planner/test_clock.py",
    ),
    Fault(
        "size-that-just-fits",
        "plan/sizes.py",
        "return next(fitting, len(self.shapes))",
        "return next(fitting, 0)",
        "a call larger than all sizes of a plan goes by the choices for the smallest, which save the most",
        "plans/test_sizes.py plans/test_lengths.py",
    ),
    Fault(
        "gradient-of-half-precision",
        "engine/tiles.py",
        "whole.narrow(dim, start, length).copy_(tile)\n        ctx.mark_dirty(whole)",
        "whole.narrow(dim, start, length).copy_(tile)\n        ctx.mark_non_differentiable(whole)",
        "the tiled result needs no gradient: everything before it stays untrained, silently",
        "core/test_tiles.py",
    ),
    Fault(
        "regions-for-free",
        "simulation/devices.py",
        "return plain + self.region * work.regions + self.call * work.calls",
        "return plain + self.call * work.calls",
        "regions cost a host nothing: plans of many small regions are promised to be fast, and are slow",
        "planner/test_launching.py planner/test_lower_bound.py planner/test_price_files.py",
    ),
)
