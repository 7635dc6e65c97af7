#!/usr/bin/env python3
"""Plants one-line bugs in the Python package, each in a copy of its own, and demands that its tests catch each.

A mutant is a named (file, original text, mutated text, tests). The text must occur exactly once, so that a mutant cannot
rot in silence. Needs an interpreter in which the package and pytest are installed (--python, .venv-python by default).
Files of Python are changed in a copy of the installed package; for those of Rust the extension module is built again,
which needs cargo. Two at a time. Prints a table; exit status 0 only if all whose tests ran were caught. Arguments: names
of mutants to run alone; or --one-in N for every Nth one, from a first that the table decides; or --check, which
only looks at the table.
"""

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time

from mutants import run_whole

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACE = ROOT / "target" / "python-mutants"
WORKERS = min(os.cpu_count() or 1, 2)
BUILDING = threading.Lock()
PACKAGE, NATIVE = "bindings/python/tokenyard", "bindings/python/src"
CALLS, OPS, TOP = f"{PACKAGE}/_calls.py", f"{PACKAGE}/ops.py", f"{PACKAGE}/__init__.py"
SGLANG, VLLM, TRANSFORMERS = (f"{PACKAGE}/integrations/{name}.py" for name in ("sglang", "vllm", "transformers"))
BUFFER, CONTEXTS, CONFIG, CHECKS, HYBRID, ELASTIC, ELASTIC_CALLS = (
    f"{PACKAGE}/deep_ep/{name}.py"
    for name in ("_buffer", "_contexts", "_config", "_checks", "_hybrid", "_elastic", "_elastic_calls")
)
CHOICES = f"{PACKAGE}/_choices.py"
HOSTS = f"{PACKAGE}/_hosts.py"
NAMES, SHARED = (f"{PACKAGE}/deep_ep/{name}.py" for name in ("_names", "_shared"))
ERRORS = f"{PACKAGE}/_errors.py"
ARRAYS, ARGUMENTS, CONTEXT, WORLDS, PROXIES = (
    f"{NATIVE}/{name}.rs" for name in ("arrays", "calls", "context", "worlds", "proxies")
)
BENCH, PROGRAM, GROUPS = (f"{PACKAGE}/{name}.py" for name in ("bench", "_program", "_worlds"))
EAGER, PLANNED = f"{PACKAGE}/_eager.py", f"{PACKAGE}/deep_ep/_planned.py"
IN_C, HANDLES, DIRECT, PLAINNESS = (f"{NATIVE}/operators/{name}.rs" for name in ("mod", "handles", "direct", "plainness"))
# Tests that are to notice.
DEEP_EP, OPERATORS, PLAIN, VERSION_2 = "test_deep_ep.py", "test_ops.py", "test_calls.py test_torch.py", "test_elastic.py"
LEFT, REFUSED = "test_deep_ep_left.py", "test_elastic_refused.py"
PERMUTED = "test_hybrid.py"

MUTANTS = [
    ("experts of vLLM numbered from 0 on each rank", VLLM, "elsewhere, local + first)", "elsewhere, local)", "test_vllm.py"),
    ("weights applied twice", VLLM, "weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights",
     "weights = topk_weights", "test_vllm.py"),
    ("other backends of vLLM treated as these", VLLM, "if backend not in _NAMES:", "if backend is None:", "test_vllm.py"),
    ("a dispatch kept for the microbatch whose thread receives it", VLLM, "self._receive(microbatch, sent, output, (experts, capacity), found)",
     "self._receive(self._microbatch(), sent, output, (experts, capacity), found)", "test_vllm_native.py"),
    ("experts of vLLM that take no dispatched rows chosen all the same", VLLM, '("use_deepep_ht_kernels", HIGH_THROUGHPUT)',
     '("use_deepep_ht_kernels", "")', "test_vllm_native.py"),
    ("vLLM's scales of what memory held before", VLLM, "rows.masked_fill_(unused[..., None], 0)", "rows.masked_fill_(unused[..., None], 1e38)",
     "test_vllm_native.py"),
    ("a half waited for whose call ended before it did anything", ERRORS, " or isinstance(error, OrderError)", "", "test_errors.py"),
    ("counts not rounded up", BUFFER, "[-(-rows // alignment) * alignment for rows in experts]", "list(experts)", DEEP_EP),
    ("the mask inverted", BUFFER, "(self._mask() != 0)", "(self._mask() == 0)", DEEP_EP),
    ("weights squared on their way back", BUFFER, "words = topk_weights.contiguous()", "words = topk_weights.square()", DEEP_EP),
    ("the second bias forgotten", BUFFER, "biases[0].float() + biases[1].float()", "biases[0].float()", DEEP_EP),
    ("a rank with more tokens not noticed", CONTEXTS, "if done.experts.pop() == 0:", "if done.experts.pop() >= 0:", DEEP_EP),
    ("scales taken for row-major", BUFFER, "column_major=self.words is not None", "column_major=False", DEEP_EP),
    ("exponents of the wrong block", BUFFER, "device=self.words.device) % 32", "device=self.words.device) % 16", DEEP_EP),
    ("experts of other ranks named", BUFFER, "_growth.of_choices(got.token_experts, self.choices, bool(counts)).long()",
     "_growth.of_choices(got.token_experts, self.choices, bool(counts)).long().abs()", DEEP_EP),
    ("a handle returned early", BUFFER, "    if kept is None:\n", "    if kept is handle:\n", DEEP_EP),
    ("too few rows for all ranks taken", BUFFER, "tokens = -(-rows // self.ranks)", "tokens = rows", DEEP_EP),
    ("tokens of no rank counted", BUFFER, "torch.where(used, topk_idx, num_experts).long()", "topk_idx.abs().long()", DEEP_EP),
    ("no new context for fp32 rows", CONTEXTS, " and self.fp32 >= other.fp32", "", DEEP_EP),
    ("a hint without scales", CONFIG, "128 * 8 + 128 * 4 + 128 * 4 + 8", "128 * 8 + 128 * 4 + 8", DEEP_EP),
    ("weights of choices elsewhere counted", ELASTIC_CALLS, "topk_weights.masked_fill(self.local < 0, 0)", "topk_weights.contiguous()",
     VERSION_2),
    ("ends of experts without their alignment", ELASTIC_CALLS, "aligned.cumsum(0, dtype=torch.int32)", "unaligned.cumsum(0, dtype=torch.int32)",
     VERSION_2),
    ("the last biases forgotten", ELASTIC, "for tensor in biases[1:]:", "for tensor in biases[2:]:", VERSION_2),
    ("slots for later choices of a rank", ELASTIC_CALLS, "torch.where(used & ~later, slot, -1)", "torch.where(used, slot, -1)", VERSION_2),
    ("tokens of several choices counted for each", ELASTIC_CALLS, "came.scatter_(0, number, 1)[:-1]",
     "came.scatter_add_(0, number, torch.ones_like(number, dtype=torch.int32))[:-1]", VERSION_2),
    ("padding of new rows not cleared", ELASTIC_CALLS, "make, size = torch.zeros if self.zero else torch.empty,",
     "make, size = torch.ones,", VERSION_2),
    ("deep_ep without its utils", NAMES, ', "hybrid_ep_buffer", "utils")', ', "hybrid_ep_buffer")', "test_deep_ep_name.py"),
    ("a half left for good", CONTEXTS, "        self._leave(sent, later, receive)\n", "        self._left = None\n", LEFT),
    ("a larger context that one rank does not make", CONTEXTS, "if later and experts[-1] != 0:", "if later and experts[-1] < 0:", LEFT),
    ("as much memory asked for again", CONTEXTS, "received, partial(prepared, later=True)", "received, prepared", LEFT),
    ("errors that close a context taken for those of a call", ERRORS, "getattr(error, \"fatal\", False) or isinstance(error, OrderError)",
     "False", LEFT),
    ("a buffer open after its block", ELASTIC, "    def __exit__(self, *raised: Any) -> None:\n        self.destroy()",
     "    def __exit__(self, *raised: Any) -> None:\n        pass", LEFT),
    ("biases of any strides refused", ELASTIC, "                out.copy_(biases[0])", "                out = biases[0].float()", REFUSED),
    ("weights of choices elsewhere by a handle", ELASTIC_CALLS, "payload[:, :choices].masked_fill(self.place.local < 0, 0)",
     "payload[:, :choices]", REFUSED),
    ("experts that are none dropped", HYBRID, "(choices < -1) | (choices >= experts)", "choices < -1", REFUSED),
    ("handles of other buffers taken", HYBRID, "handle.routed.owner is not self._dispatches", "handle.routed.owner is None", REFUSED),
    ("a second low-latency call sent before the first is received", BUFFER, "            self._dispatched.before_next()\n        handle = LowL",
     "            pass\n        handle = LowL", DEEP_EP),
    ("micro-batches in one context", SGLANG, "key = (self._group, self._index, ", "key = (self._group, ", "test_sglang.py"),
    ("weights of other ranks' experts", SGLANG, "got.token_weights[:, :choices].contiguous()",
     "got.token_weights[:, :choices].roll(1, 1)", "test_sglang.py"),
    ("columns of an idle rank", SGLANG, "ids.shape[1] < self._top_k", "ids.shape[1] < 0", "test_sglang.py"),
    ("a dispatch with unusable routing not received", SGLANG, "sent = found.take(error, \"sent\")", "raise", "test_sglang.py"),
    ("a refused combine forgotten", SGLANG, "ep, handle, weighted = self._kept\n", "(ep, handle, weighted), self._kept = self._kept, None\n",
     "test_sglang.py"),
    ("what an interrupt left in flight forgotten", SGLANG, "self._sent = call_of(error.sent, found)", "pass", "test_sglang.py"),
    ("combine sent while others compile", SGLANG, "        self._engine._deepep_precompile_tp_barrier()\n        try:", "        try:",
     "test_sglang.py"),
    ("contexts of captured graphs replaced", SGLANG, "if choices not in self._low_latency:", "if self._low_latency.clear() is None:",
     "test_sglang.py"),
    ("a larger context beside the smaller one", TRANSFORMERS, "        self._ep = None\n        self._ep", "        self._ep",
     "test_transformers.py"),
    ("a layer left before its combine", TRANSFORMERS, "got: ops.Dispatched = found.take(error, \"dispatched\")", "raise",
     "test_transformers.py"),
    ("experts named several times refused", TRANSFORMERS, "most * top_k <= _CHOICES", "False", "test_transformers.py"),
    ("an error in place of the second half not noted", ERRORS, "            self._error = error\n        return receive()", "            raise\n        return receive()",
     "test_ops_refused.py"),
    ("the first of equal choices taken for all", CHOICES, "match & (match.cumsum(1) == nth[:, None] + 1)", "match",
     OPERATORS),
    ("weights of rows that are none", CHOICES, " & (local >= 0)[:, None]", "", OPERATORS),
    ("rows of exactly as many flagged as dropped", HYBRID, '(got.also["row_count"] > rows)', '(got.also["row_count"] >= rows)', PERMUTED),
    ("rows without room an error where nobody waits", HYBRID, "align, rows, drop=True)", "align, rows)", PERMUTED),
    ("counts of dropped rows kept", HYBRID, "            got.counts[: self.local].clamp_(max=torch.tensor(padded, dtype=torch.int32, device=device))\n",
     "", PERMUTED),
    ("dropped rows not flagged", HYBRID, "torch.full((1,), int(dropped)", "torch.full((1,), 0", PERMUTED),
    ("a token with more choices not noticed", HYBRID, "(number[:, -1] > choices).any()", "(number[:, -1] > experts).any()", PERMUTED),
    ("probabilities of other ranks' experts added", HYBRID, "torch.where(of_rows >= 0, words.gather(1, place), 0)",
     "words.gather(1, place)", PERMUTED),
    ("dropped rows brought by a handle", HYBRID, "_cut(again, routed.rows, rows)", "_cut(again, routed.kept.capacity, rows)", PERMUTED),
    ("an exact dispatch that Ctrl-C cut short without its results", CALLS, 'if hasattr(error, "handle"):', "if False:", "test_ops_refused.py"),
    ("rows of no token not cleared", OPS, "rows = torch.zeros(shape", "rows = torch.ones(shape", OPERATORS),
    ("gradients through weights that are lost", OPS, 'if kept.value.format.weights == "none" or (', "if True or (", OPERATORS),
    ("handles kept for good", OPS, "            del _KEPT[key]", "            pass", OPERATORS),
    ("capacity for one choice of each token", CALLS, "min(self._top_k, experts)", "1", PLAIN),
    ("counts taken without their alignment", CALLS, "sum(-(-rows // align) * align for rows in experts)", "sum(experts)", PLAIN),
    ("strides of scales exchanged", ARGUMENTS, "call.view(scales)?, token_bytes, word_bytes", "call.view(scales)?, word_bytes, token_bytes",
     DEEP_EP),
    ("a payload left behind", ARGUMENTS, "    Ok((to.payload(payload), tokens))\n", "    let _ = payload;\n    Ok((to, tokens))\n", OPERATORS),
    ("calls not waited for", CONTEXT, "let waited = errors::wait(py, || ep.stream.synchronize(self.patience));", "let waited = Ok::<(), PyErr>(());", PLAIN),
    ("gaps between rows not seen", ARRAYS, "Ok((self.len() > 1).then_some(rows_apart))", "Ok(Some(rows_apart).filter(|_| false))", PLAIN),
    ("sums written over what was there", CONTEXT, ".accumulate(accumulate)", ".accumulate(accumulate && false)", DEEP_EP),
    ("new rows in the context's format", CONTEXT, "format.unwrap_or(&handle.format)", "format.unwrap_or(&self.format)",
     PLAIN),
    ("masks of numbers taken for experts", CHECKS, "(tokens, ranks), (torch.bool,)", "(tokens, ranks)", "test_deep_ep_refused.py"),
    ("sums that no hook can write", CHECKS, "    shaped(\"out\", given, shape, _ROWS)\n", "", "test_deep_ep_refused.py"),
    ("a hook without its results", BUFFER, 'setattr(error, "dispatched", results(error.sent))', "pass", "test_deep_ep_refused.py"),
    ("weights of choices that a call lacks left out", OPS, "torch.nn.functional.pad(topk_weights.float(), room)",
     "topk_weights.float()", "test_ops_refused.py"),
    ("a refused dispatch sent", CALLS, "        must_lie(layout, align)\n        also = _further(also)\n        try:", "        try:",
     "test_ops_refused.py"),
    ("a proxy left out", CONTEXT, "            builder = builder.proxy(&proxy);\n", "            let _ = &proxy;\n", "test_nodes.py"),
    ("another network opened", PROXIES, '("tcp", Network::Tcp)', '("tcp", Network::Verbs)', "test_nodes.py"),
    ("errors kept by their own frames", ERRORS, "            raise error\n        finally:\n            del error\n",
     "            raise error\n        finally:\n            pass\n", "test_deep_ep_refused.py"),
    ("the number that was sent in an error of routing", ERRORS, "if sent is not None:", "if False:",
     "test_deep_ep_refused.py test_elastic_refused.py"),
    ("an earlier call's choices in an error of routing", ERRORS,
     "token < sent.shape[0] and choice < sent.shape[1] and int(sent[token, choice]) == NO_EXPERT", "True",
     "test_deep_ep_refused.py"),
    ("an error in place of ElasticBuffer's second half", ELASTIC_CALLS,
     "found.receive(partial(ep.dispatch_recv, sent, made.output))", "ep.dispatch_recv(sent, made.output)", REFUSED),
    ("an error in place of HybridEP's second half", HYBRID, "found.receive(partial(ep.dispatch_recv, sent, output))",
     "ep.dispatch_recv(sent, output)", REFUSED),
    ("results of several sizes, of which the last alone is judged", BENCH, "all(found[\"verified\"] for found in reports)",
     "reports[-1][\"verified\"]", "test_bench.py"),
    ("results from before an error not written", BENCH, "    written = _written(args, results)\n", "    written = status or _written(args, results)\n",
     "test_bench.py"),
    ("wrong results not printed", BENCH, "return _program.say(_NAME, text) or status", "return status or _program.say(_NAME, text)",
     "test_bench.py"),
    ("freed memory shared by further calls", IN_C, " && shared.tensor.has_bytes(all_bytes)", "", "test_eager.py"),
    ("handles in pickled exceptions", ERRORS, " if name not in _MADE", "", "test_close.py"),
    ("an all-gather that gc cannot see", WORLDS, "map_or(Ok(()), |all_gather| visit.call(&*all_gather))",
     "map_or(Ok(()), |_| { let _ = &visit; Ok(()) })", "test_close.py"),
    ("rows of other tokens not compared", BENCH, "wanted = torch.full_like(found, 255)", "wanted = found.clone()", "test_bench.py"),
    ("a NaN within the bound", BENCH, "(~(error <= bound)).sum()", "(error > bound).sum()", "test_bench.py"),
    ("scales not compared", BENCH, "(words != of_rows).sum()", "(words != words).sum()",
     "test_bench.py"),
    ("capsules dropped before the call", ARGUMENTS, "self.capsules.borrow_mut().push(capsule);", "drop(capsule);", "test_dlpack.py"),
    ("gradients lost in eager calls", PLAINNESS, "let asked = array.element.has_gradient() &&", "let asked = false &&", "test_eager.py test_ops.py"),
    ("gradients lost beside a profiler", DIRECT, "if !are_plain(objects)? {", "if false {", "test_eager.py"),
    ("types of their own taken for tensors", PLAINNESS, "if !torch.types.contains(", "if false && !torch.types.contains(", "test_eager.py"),
    ("tangents lost in eager calls", PLAINNESS, "level.extract::<i64>())? >= 0)", "level.extract::<i64>())? > 99)", "test_eager.py"),
    ("plans of calls that train", EAGER, "    if not torch.is_grad_enabled():\n", "    if True:\n", "test_eager.py"),
    ("traces that miss eager calls", PLAINNESS, "if watching.holds(py)? {", "if false {", "test_eager.py test_ops.py"),
    ("bytes of one call in those of another", IN_C, "shared.next += bytes;", "",
     "test_low_latency.py"),
    ("small outputs with memory of their own", CALLS, "together=[small], shared=0,", "together=[small],", "test_eager.py"),
    ("memory of one call for all", IN_C, "self.calls = (SHARED_BYTES / bytes.max(1)).clamp(1, SHARING_CALLS);", "self.calls = 1;",
     "test_low_latency.py"),
    ("outputs of one memory on one another", IN_C, "all.checked_add(own)", "Some(all + 0 * own)", "test_low_latency.py"),
    ("a barrier of streams not waited for", f"{NATIVE}/barriers.rs", "core.finished_with(py, &ep, || Box::new(()))", "Ok(())", "test_calls.py"),
    ("a handle keeps rows", PLANNED, '"scales"], ["source", ', '"scales", "source"], [', "test_low_latency.py"),
    ("operators in C leave no rows out", IN_C, "output.dropping(self.drop_overflow)?", "output.dropping(false)?", "test_drop.py"),
    ("capacities not rounded where rows are left out", CALLS, "align) * align if drop_overflow else capacity", "1) * 1 if drop_overflow else capacity",
     "test_drop.py"),
    ("compiled code leaves out calls of which nothing is used", OPS, 'elif "!" not in schema:', "elif False:", OPERATORS),
    ("a handler's call takes what its outer call found", CONTEXT, ".filter(|_| held.is_nested())", ".filter(|_| false)",
     "test_errors.py"),
    ("sums of a combine that Ctrl-C ended", EAGER, "raise_with(out if made else None, \"out\")", "raise_with(None)", "test_errors.py"),
    ("exact dispatches of two threads mixed", CALLS, "            with self.one_call():\n                return", "            if True:\n                return",
     "test_calls.py"),
    ("exact operators of two threads mixed", OPS, "with ep.one_call():", "if True:", OPERATORS),
    ("contexts of buffers wait for 30 s", SHARED, "if seconds > world.timeout else world", "if False else world", "test_low_latency.py"),
    ("sums that no rows fit", CHECKS, '    beside("out", given, x)\n    _aligned("out", given)\n', '    beside("out", given, x)\n',
     "test_deep_ep_refused.py"),
    ("freed memory not looked at", CHECKS, "        in_memory(name, given)\n", "        pass\n", "test_deep_ep_refused.py"),
    ("tensors of SGLang on another device", f"{PACKAGE}/integrations/sglang.py", "        beside(name, tensor, x)\n", "        pass\n", "test_sglang.py"),
    ("sums of vLLM that share memory", VLLM, "if _overlaps(out) == 1:", "if False:", "test_vllm_native.py"),
    ("a half that Ctrl-C loses", f"{NATIVE}/operators/halves.rs", "UNTAKEN.with_borrow(|untaken| untaken.get(number).cloned()).map(Half)",
     "UNTAKEN.with_borrow_mut(|untaken| untaken.take(number)).map(Half)", "test_low_latency.py"),
    ("profiles without operators", DIRECT, "if torch.profiled.holds(py)? {", "if false {", "test_eager.py"),
    ("results of a call in another order", DIRECT, "tensors.iter().map(", "tensors.iter().rev().map(", "test_eager.py"),
    ("negative views not known by their function", f"{NATIVE}/dlpack.rs", "is_neg(value.as_ptr(), null_mut())) }?.is_truthy()",
     "is_neg(value.as_ptr(), null_mut())) }?.is_truthy().map(|_| false)", "test_torch.py"),
    ("the sums that were given not returned", DIRECT, "if let Some(place) = returned {", "if let Some(place) = None::<usize> {",
     "test_eager.py"),
    ("a refused call receives the one before", BUFFER, "            _checks.low_latency_tokens(x, topk_idx, shape.members[0], shape.scaled)\n",
     "", "test_low_latency.py"),
    ("rows that overlap make a context", CHECKS, "pitch < given.shape[1] or ", "", "test_low_latency.py"),
    ("rows of an output with room thrown away", ERRORS, "return isinstance(self._error, CapacityError)", "return bool(self)", "test_eager.py"),
    ("rows of an output without room kept", EAGER, "        made[1].zero_()\n", "        pass\n", "test_eager.py"),
    ("tokens of sources taken for their ranks", PLANNED, "(2 * capacity, 2), 1)", "(2 * capacity, 2), 0)", "test_low_latency.py"),
    ("an operator's errors lost", IN_C, "pending.put(number, raised)", "pending.put(number + 1, raised)", "test_eager.py test_low_latency.py"),
    ("fakes for real tensors", OPS, 'if device.type == "meta" and real:', "if False:", "test_eager.py"),
    ("memory that was freed", f"{NATIVE}/operators/shim.rs", "if memory == 0 && !", "if memory < 0 && !", "test_eager.py"),
    ("memory that was freed, in calls", ARRAYS, "Ok(if bytes == 0 { 0 } else { pointer })", "Ok(pointer + 0 * bytes)", "test_eager.py"),
    ("a rank that is masked cuts others off", CONTEXTS, "with_nodes([1] * hosts.world.size)", "with_nodes(hosts.world.nodes)", "test_hosts.py"),
    ("a context that goes before its call is refused", CONTEXTS, "        _checks.low_latency(x, tokens,", "        self.clean()\n        _checks.low_latency(x, tokens,", "test_low_latency.py"),
    ("the interpreter's lock taken for held", f"{NATIVE}/lock.rs", "let _held = Held(unsafe { ffi::PyGILState_Ensure() });", "", "test_eager.py"),
    ("weights that a flag leaves out read", IN_C, "(flags & flag != 0).then_some(name)", "(flag != 0).then_some(name)", "test_eager.py"),
    ("a caller's sums overwritten where they are to be added to", IN_C, "&out, flags & ACCUMULATE != 0)", "&out, false)", "test_eager.py"),
    ("the tokens' weights where their experts belong", EAGER, "row_scales, first, second, plan)", "row_scales, second, first, plan)",
     "test_eager.py"),
    ("writes of an operator in C not counted", EAGER, "counted = [tensor for tensor in tensors if", "counted = [tensor for tensor in () if",
     "test_eager.py"),
    ("rows of another width in low-latency calls", IN_C, "let fits = hidden == format.inner.hidden && ", "let fits = hidden > 0 && ",
     "test_low_latency.py"),
    ("fewer choices in low-latency calls", IN_C, "if !numbers || ids.shape() != wanted ||", "if !numbers || ids.len() != wanted[0] ||",
     "test_low_latency.py"),
    ("numbers of handles that nobody lets go", HANDLES, "|numbered| numbered.remove(&self.0));", "|numbered| numbered.get(&self.0).cloned());",
     "test_low_latency.py"),
    ("a handle for whoever asks next", HANDLES, "rposition(|(untaken, _)| *untaken == number)?", "rposition(|(untaken, _)| *untaken > 0 || *untaken == number)?",
     "test_low_latency.py"),
    ("a number of a process that a fork keeps", f"{NATIVE}/process.rs", "    KNOWN.store(0, Ordering::Relaxed);", "", "test_errors.py test_close.py"),
    ("a half that was refused lost", BUFFER, "                    # An earlier call's error came in its place.\n                    continue\n",
     "                    pass\n", "test_low_latency.py"),
    ("a hook that an earlier call's error ends", BUFFER, "            self._receive()\n        self._called, self._receive = True, None\n",
     "            self._called = True\n            self._receive()\n        self._called, self._receive = True, None\n", "test_low_latency.py"),
    ("a handle that a failing hook loses", PLANNED, '        received = getattr(error, "handle", None)', "        received = None",
     "test_low_latency.py test_deep_ep_left.py test_deep_ep.py"),
    ("sums of another call's half", f"{NATIVE}/operators/halves.rs", "untaken.put(number, half)", "untaken.put(number + 1, half)", "test_low_latency.py"),
    ("handles that outlive their tensors", HANDLES, "|handles| handles.remove(&self.key));", "|handles| handles.get(&self.key).cloned());",
     "test_eager.py test_ops.py"),
    ("scales past the last not compared", BENCH, "(words != of_rows).sum()", "(words[rows] != of_rows[rows]).sum()", "test_bench.py"),
    ("an expert named twice taken for once", BENCH, "sum((came - wanted_pairs).values())", "len(set(came) - set(wanted_pairs))",
     "test_bench.py"),
    ("iterations that write the sets of rows", BENCH, "t.to(device, copy=True)", "t.to(device)", "test_bench.py"),
    ("options of ranks not compared", BENCH, "if others[name] != of_ranks[0][name]:", "if False:", "test_bench.py"),
    ("a reader that has gone an error", PROGRAM, "if not isinstance(error, BrokenPipeError):", "if error:", "test_program.py"),
    ("a group's ranks on the GPUs of others", GROUPS, "part = job[0] %", "part = rank %", "test_torch.py"),
    ("a network that one rank could not open", HOSTS, 'if each["failed"] and proxy is not None:', "if proxy is None:",
     "test_hosts.py"),
    ("a proxy whose peers have gone", HOSTS, 'if all(number in each["have"] for each in ranks)]', "if number in fit]",
     "test_hosts.py"),
    ("no proxy beside a full one", HOSTS, 'if any(each["full"] for each in self._exchange({"full": full})):',
     'if self._exchange({"full": full}) is None:', "test_hosts.py"),
    ("endpoints by ranks of the newest world", "proxy/network.rs", "let rank = world.original(world.rank());",
     "let rank = world.rank();", "test_nodes.py"),
    ("the members' all-gather left out", f"{NATIVE}/worlds.rs", "let Some(all_gather) = all_gather else {",
     "let Some(all_gather) = all_gather.filter(|_| false) else {", "test_nodes.py"),
    ("lost gradients not refused", f"{PACKAGE}/_tensors.py", "tensor.requires_grad for tensor", "tensor.is_complex() for tensor", "test_ops.py"),
    ("terms of the first rank alone", HOSTS, "if len(set(terms)) > 1:", "if len(terms) < 1:", "test_hosts.py"),
    ("nodes counted by the group's ranks", GROUPS, 'nodes[each["rank"] if len(nodes) == job else rank]', "nodes[rank]",
     "test_hosts.py"),
    ("ranks of other hosts counted", GROUPS, "local_rank = hosts[:rank].count(hosts[rank])", "local_rank = rank", "test_hosts.py"),
]


def checked(name, file, old):
    """The file's text, in which `old` occurs once."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = text.count(old)
    if found != 1:
        sys.exit(f"{name}: its text occurs {found} times in {file}: renew the mutant")
    return text


def built(file, text):
    """The extension module of a tree with this text, in a copy of the repository. One at a time."""
    tree = PLACE / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / file).write_text(text, encoding="utf-8")
    # Tests take as long without optimisation, and the first build half as long.
    given = os.environ | {"CARGO_TARGET_DIR": str(PLACE / "target"), "TOKENYARD_NVCC": "none", "PYO3_BUILD_EXTENSION_MODULE": "1",
                          "CARGO_PROFILE_RELEASE_OPT_LEVEL": "0", "CARGO_PROFILE_RELEASE_DEBUG": "0",
                          "CARGO_PROFILE_RELEASE_LTO": "false"}
    command = ["cargo", "build", "--release", "-q", "-p", "tokenyard-python"]
    done = subprocess.run(command, cwd=tree, env=given, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"the mutant of {file} does not build:\n{done.stderr[-2000:]}")
    return PLACE / "target" / "release" / "lib_native.so"


def survives(python, mutant, place):
    """Whether the tests pass with the mutant; None if all of them were skipped. Works in the folder `place`."""
    name, file, old, new, tests = mutant
    text = checked(name, file, old).replace(old, new)
    installed = subprocess.run([python, "-c", "import tokenyard; print(tokenyard.__path__[0])"], check=True,
                               capture_output=True, text=True).stdout.strip()
    site = place / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(installed, site / "tokenyard")
    if file.endswith(".rs"):
        with BUILDING:
            shutil.copy2(built(file, text), site / "tokenyard" / "_native.abi3.so")
    else:
        (site / file.removeprefix("bindings/python/")).write_text(text, encoding="utf-8")
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    given = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = run_whole(command, ROOT / "tests" / "python", given, 600)
    except subprocess.TimeoutExpired:
        return False
    # 5: what the tests need is not installed. 1: a test failed. A mutant of a check of memory ends them by SIGSEGV, one of
    # the interpreter's lock by SIGABRT. Anything else says nothing of the mutant.
    if done.returncode == 5:
        return None
    if done.returncode not in (0, 1, -signal.SIGSEGV, -signal.SIGABRT):
        sys.exit(f"{name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    # From here: mutants run in folders of their own.
    parser.add_argument("--python", type=os.path.abspath, default=str(ROOT / ".venv-python" / "bin" / "python"))
    parser.add_argument("--one-in", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    for name, file, old, new, _tests in MUTANTS:
        checked(name, file, old)
        if old == new:
            sys.exit(f"{name} changes nothing")
    if given.check:
        return 0
    unknown = set(given.names) - {mutant[0] for mutant in MUTANTS}
    if unknown:
        sys.exit(f"no mutant is called {', '.join(sorted(unknown))}")
    first = int(hashlib.sha256(repr(MUTANTS).encode()).hexdigest(), 16) % given.one_in
    chosen = [mutant for mutant in MUTANTS if mutant[0] in given.names] or MUTANTS[first :: given.one_in]
    # A build takes longest: it begins first, beside the others.
    chosen.sort(key=lambda mutant: not mutant[1].endswith(".rs"))
    places = queue.SimpleQueue()
    for worker in range(WORKERS):
        places.put(PLACE / f"worker-{worker}")

    def judged(mutant):
        place, start = places.get(), time.monotonic()
        try:
            return mutant[0], survives(given.python, mutant, place), time.monotonic() - start
        finally:
            places.put(place)

    missed, skipped = [], 0
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as workers:
        for name, alive, seconds in workers.map(judged, chosen):
            missed += [name] * bool(alive)
            skipped += alive is None
            said = "skipped" if alive is None else "SURVIVES" if alive else "caught"
            print(f"{said:8} {seconds:5.0f} s  {name}", flush=True)
    print(f"{len(chosen) - len(missed) - skipped} of {len(chosen)} caught" + f", {skipped} skipped" * bool(skipped))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
