"""tokenyard beside other exchanges of tokens, in one run: the same tokens and routing, by rounds of mirrored order.

    torchrun --nproc-per-node 8 benches/compare.py --json compare.json --plot compare.svg
    python3 benches/compare.py --world 2 --device cpu --tokens 16 --hidden 256 --experts 8 --top-k 2 --rounds 2 --iters 3

Contenders: tokenyard's `AllToAll` and its `deep_ep` (normal, low latency), torch.distributed's `all_to_all_single` with
permutation, transformers' all-to-all, and DeepEP where it is installed. What cannot run is a line of the table that says
why. Rows are bf16. Each contender dispatches, the same experts are applied untimed, and each combines to weighted sums.
Sums of each contender are compared element by element with a reference at fp64, and with those of the first contender.
What a contender made is overwritten with NaNs before the next one runs, which may get the same memory. Odd rounds take
the contenders in the opposite order. A barrier aligns the ranks before each timed part, on a GPU one of their streams.

On the CPU a call is timed by the host's clock until its rows or sums can be used. On a GPU each iteration has two pairs
of calls. CUDA events time the first pair on the GPU. Calls that can be captured are replays of a CUDA graph there, so
that no work of the host is between the events. Other calls wait on the host, for counts of rows, and their time on the
GPU has these waits: the table says by what each is timed. The host's clock times the second pair, eager calls, until
each returns.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import tokenyard
from tokenyard import _program, bench

HERE = os.path.dirname(os.path.abspath(__file__))


class Plain:
    """tokenyard's own interface: a row for each (token, expert), expert after expert."""

    name, captured = "tokenyard AllToAll", True

    def __init__(self, job):
        s, self.job = job.shape, job
        self.ep = tokenyard.AllToAll(job.world, hidden=s.hidden, experts=s.experts, top_k=s.top_k, max_tokens_per_rank=s.tokens,
                                     device=str(job.device))

    def dispatch(self, x, ids, weights):
        return self.ep.dispatch(x, ids, weights)

    def experts(self, got):
        places = torch.arange(len(got.rows), device=got.rows.device)
        local = torch.bucketize(places, got.offsets[1:].long(), right=True).clamp(max=len(self.ep.local_experts) - 1)
        own = torch.tensor(self.ep.local_experts, device=got.rows.device)
        return self.job.apply(got.rows, own[local])

    def combine(self, got, rows):
        return self.ep.combine(rows, got.handle)


class Normal:
    """The normal calls of DeepEP's interface: a row for each (token, rank); experts apply weights."""

    name, options = "tokenyard deep_ep, normal", {}

    def __init__(self, job):
        self.job = job
        self.buffer = self.module().Buffer(job.group, **self.options)

    def module(self):
        import tokenyard.deep_ep

        return tokenyard.deep_ep

    def dispatch(self, x, ids, weights):
        of_rank, of_rdma, of_expert, named, _ = self.buffer.get_dispatch_layout(ids, self.job.shape.experts)
        return self.buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=of_rank,
                                    num_tokens_per_rdma_rank=of_rdma, is_token_in_rank=named, num_tokens_per_expert=of_expert)

    def experts(self, got):
        rows, local, weights = got[0], got[1], got[2]
        total = torch.zeros(rows.shape, device=rows.device)
        for k in range(local.shape[1]):
            used = local[:, k] >= 0
            made = self.job.apply(rows[used], local[used, k] + self.job.first_expert)
            total[used] += made.float() * weights[used, k, None]
        return total.to(rows.dtype)

    def combine(self, got, rows):
        return self.buffer.combine(rows, got[4])[0]


class LowLatency(Normal):
    """The low-latency calls of DeepEP's interface: a row for each (token, expert), as many places as can be needed."""

    name, captured = "tokenyard deep_ep, low latency", True

    def dispatch(self, x, ids, weights):
        shape = self.job.shape
        return (*self.buffer.low_latency_dispatch(x, ids, shape.tokens, shape.experts, use_fp8=False), ids, weights)

    def experts(self, got):
        numbers = self.job.first_expert + torch.arange(len(got[0]), device=got[0].device)
        flat = got[0].reshape(-1, got[0].shape[-1])
        return self.job.apply(flat, numbers.repeat_interleave(got[0].shape[1])).reshape(got[0].shape)

    def combine(self, got, rows):
        return self.buffer.low_latency_combine(rows, got[-2], got[-1], got[2])[0]


class DeepEP(Normal):
    """DeepEP itself."""

    name, options, needs, gpu_only = "DeepEP, normal", {"num_nvl_bytes": 1 << 30}, "deep_ep", True

    def module(self):
        import deep_ep

        return deep_ep


class DeepEPLowLatency(LowLatency):
    """DeepEP itself, its low-latency calls."""

    name, needs, gpu_only = "DeepEP, low latency", "deep_ep", True

    def __init__(self, job):
        import deep_ep

        self.job, s = job, job.shape
        size = deep_ep.Buffer.get_low_latency_rdma_size_hint(s.tokens, s.hidden, s.world, s.experts)
        self.buffer = deep_ep.Buffer(job.group, 0, size, low_latency_mode=True, num_qps_per_rank=s.experts // s.world)


class Permuted:
    """all_to_all_single: rows sorted by expert, counts exchanged, rows exchanged, and back with the weighted sum."""

    name = "torch all_to_all_single"

    def __init__(self, job):
        self.job, self.local = job, job.shape.experts // job.shape.world

    def exchange(self, rows, receive, send):
        came = rows.new_empty((sum(receive), rows.shape[1]))
        dist.all_to_all_single(came, rows, receive, send, group=self.job.group)
        return came

    def dispatch(self, x, ids, weights):
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        sent = flat.bincount(minlength=self.job.shape.experts).reshape(-1, self.local)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self.job.group)
        send, receive = sent.sum(1).tolist(), came.sum(1).tolist()
        rows = self.exchange(x[order // ids.shape[1]], receive, send)
        # Rows of a source are in the order of experts: a second sort makes those of an expert neighbours.
        of_row = torch.arange(self.local, device=x.device).repeat(len(send)).repeat_interleave(came.reshape(-1))
        by_expert = of_row.argsort(stable=True)
        return rows[by_expert], of_row[by_expert], by_expert, order, send, receive, weights

    def experts(self, got):
        return self.job.apply(got[0], got[1] + self.job.first_expert)

    def combine(self, got, rows):
        _, _, by_expert, order, send, receive, weights = got
        back = self.exchange(torch.empty_like(rows).index_copy_(0, by_expert, rows), send, receive)
        choices = torch.empty_like(back).index_copy_(0, order, back).reshape(*weights.shape, -1)
        return (choices.float() * weights[..., None]).sum(1).to(rows.dtype)


class Transformers:
    """transformers' `AllToAllEP`, its two halves."""

    name, needs = "transformers AllToAllEP", "transformers"

    def __init__(self, job):
        from torch.distributed.device_mesh import init_device_mesh
        from transformers.distributed.expert_parallel import AllToAllEP

        self.job = job
        mesh = init_device_mesh(job.device.type, (job.shape.world, 1), mesh_dim_names=("ep", "tp"))
        self.layer = AllToAllEP.__new__(AllToAllEP)
        self.layer.ep_mesh, self.layer.tp_mesh = mesh["ep"], mesh["tp"]
        self.layer.num_local_experts = job.shape.experts // job.shape.world

    def dispatch(self, x, ids, weights):
        return self.layer._dispatch_tokens(x, ids, weights)

    def experts(self, got):
        return self.job.apply(got[0], got[1][:, 0] + self.job.first_expert)

    def combine(self, got, rows):
        return self.layer._combine_tokens(rows, got[3])


class Absent:
    """A library for which there is no adapter here, and whose presence the table reports."""

    def __init__(self, name, needs):
        self.name, self.needs, self.missing = name, needs, "no adapter for it in benches/compare.py"


CONTENDERS = [Plain, Normal, LowLatency, Permuted, Transformers, DeepEP, DeepEPLowLatency, Absent("pplx-kernels", "pplx_kernels"),
              Absent("NCCL EP", "nccl.ep"), Absent("FlashInfer", "flashinfer"), Absent("MoRI", "mori")]


class Job:
    """What all contenders of a rank share."""

    def __init__(self, args, rank, device):
        self.shape = bench.Shape(args.world, args.tokens, args.hidden, args.experts, args.top_k, "bf16", seed=args.seed)
        self.rank, self.device, self.group = rank, device, dist.group.WORLD
        self.world = tokenyard.World.from_group()
        # For its barrier alone.
        self.barrier = tokenyard.AllToAll(
            self.world, hidden=64, experts=args.world, top_k=1, max_tokens_per_rank=1, device=str(device)
        ).barrier
        self.first_expert = self.shape.experts_of(rank)[0]
        draw = torch.Generator().manual_seed(args.seed)
        self.factor, self.shift = (torch.randn(args.experts, generator=draw).to(device) for _ in range(2))

    def apply(self, rows, experts):
        """What experts make of rows `[n, hidden]`, by the number of each row's expert."""
        return (rows.float() * self.factor[experts, None] + self.shift[experts, None]).to(rows.dtype)

    def reference(self, given):
        """The weighted sums at fp64, and how far bf16 rows, partial sums and sums may be from them."""
        exact = torch.zeros(given.x.shape, dtype=torch.float64)
        terms = torch.zeros_like(exact)
        factor, shift = self.factor.double().cpu(), self.shift.double().cpu()
        for k in range(given.ids.shape[1]):
            made = given.x.double() * factor[given.ids[:, k], None] + shift[given.ids[:, k], None]
            term = made * given.weights[:, k, None].double()
            exact, terms = exact + term, terms + term.abs()
        return exact, 4 * 2.0**-8 * terms + 1e-6


def why_not(contender, device):
    """Why a contender cannot run here; None if it can."""
    needs = getattr(contender, "needs", None)
    if needs is not None and not _found(needs):
        return f"not installed: {needs}"
    if getattr(contender, "missing", None):
        return contender.missing
    return "needs a GPU" if getattr(contender, "gpu_only", False) and device.type == "cpu" else None


def _found(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def agreed(own):
    """The first reason of any rank, in the order of ranks."""
    reasons = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, own)
    return next((reason for reason in reasons if reason is not None), None)


class Graphs:
    """A contender's dispatch and combine as CUDA graphs: their arrays, which replays read and write. Collective."""

    def __init__(self, job, contender):
        given = bench.inputs(job.shape, 0, job.rank)
        self.given = [each.to(job.device) for each in (given.x, given.ids, given.weights)]
        got = contender.dispatch(*self.given)
        rows = contender.experts(got)
        contender.combine(got, rows)
        self.wait(job)
        self.rows, graphs = torch.empty_like(rows), [torch.cuda.CUDAGraph() for _ in range(2)]
        # Threads of communication libraries ask for events meanwhile.
        with torch.cuda.graph(graphs[0], capture_error_mode="thread_local"):
            self.got = contender.dispatch(*self.given)
        with torch.cuda.graph(graphs[1], capture_error_mode="thread_local"):
            self.sums = contender.combine(self.got, self.rows)
        self.dispatch, self.combine = (graph.replay for graph in graphs)
        self.wait(job)

    @staticmethod
    def wait(job):
        torch.cuda.current_stream().synchronize()
        job.world.barrier()

    @classmethod
    def of(cls, job, contender):
        """The graphs of a contender, or why it has none, the same on all ranks."""
        if not getattr(contender, "captured", False):
            return None, "its calls wait on the host"
        made, reason = None, None
        try:
            made = cls(job, contender)
        except Exception as failure:  # noqa: BLE001: it is timed without
            reason = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        reason = agreed(reason)
        return (made, None) if reason is None else (None, reason)


def timed(job, clock, call):
    if job.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    job.world.barrier()
    return clock.time(call, job.barrier)


def once(job, clock, contender, given, times, graphs=None):
    """One dispatch and combine, replays of `graphs` if they are given: their times are added to `times`; the sums."""
    x, ids, weights = (each.to(job.device) for each in (given.x, given.ids, given.weights))
    if graphs is None:
        sending, got = timed(job, clock, lambda: contender.dispatch(x, ids, weights))
        rows = contender.experts(got)
        back, sums = timed(job, clock, lambda: contender.combine(got, rows))
    else:
        for own, new in zip(graphs.given, (x, ids, weights)):
            own.copy_(new)
        sending, _ = timed(job, clock, graphs.dispatch)
        got, rows, sums = graphs.got, graphs.rows, graphs.sums
        rows.copy_(contender.experts(got))
        back, _ = timed(job, clock, graphs.combine)
    times["dispatch"].append(sending)
    times["combine"].append(back)
    found = sums.cpu().double()
    # The next contender's outputs may lie where these did: one that it does not write must not hold what these held.
    kept = {each.untyped_storage().data_ptr() for each in (x, ids, weights, given.x, given.ids, given.weights)}
    for made in tensors((got, rows, sums)):
        if made.is_floating_point() and made.untyped_storage().data_ptr() not in kept:
            made.fill_(float("nan"))
    return found


def tensors(made):
    """The tensors of what a call made, in its tuples and lists."""
    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, (tuple, list)):
        for each in made:
            yield from tensors(each)


def measure(args, rank, device):
    """The results of all contenders, by rank 0's table."""
    job, on_gpu = Job(args, rank, device), device.type == "cuda"
    clock, host = bench.Clock(on_gpu), bench.Clock(False)
    results, running, graphs = {}, [], {}
    for kind in CONTENDERS:
        reason, made = why_not(kind, device), None
        if reason is None:
            try:
                made = kind(job)
            except Exception as failure:  # noqa: BLE001: a contender that fails is a line of the table
                reason = f"could not start: {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        if (reason := agreed(reason)) is not None:
            results[kind.name] = {"missing": reason}
        else:
            running.append(made)
            results[kind.name] = {"wrong": 0, "differ": 0, "checked": 0, "dispatch": [], "combine": [], "timed": "clock"}
            if on_gpu:
                graphs[kind.name], reason = Graphs.of(job, made)
                how = {"timed": "graph"} if reason is None else {"timed": "events", "not_captured": reason}
                results[kind.name].update(how, host={"dispatch": [], "combine": []})
    for number in range(args.warmup + args.rounds * args.iters):
        given = bench.inputs(job.shape, number, rank)
        exact, bound = job.reference(given)
        warm = number < args.warmup
        mirrored = not warm and ((number - args.warmup) // args.iters) % 2 == 1
        sums = {}
        for contender in reversed(running) if mirrored else running:
            nowhere, of = {"dispatch": [], "combine": []}, results[contender.name]
            found = [once(job, clock, contender, given, nowhere if warm else of, graphs.get(contender.name))]
            if on_gpu:
                found.append(once(job, host, contender, given, nowhere if warm else of["host"]))
            sums[contender.name] = found
        for name, of_calls in sums.items():
            of = results[name]
            for found in of_calls:
                of["checked"] += 1
                of["wrong"] += int((~((found - exact).abs() <= bound)).sum())
                of["differ"] += int((~((found - sums[running[0].name][0]).abs() <= 2 * bound)).sum())
    job.world.barrier()
    gathered = [None] * args.world
    dist.all_gather_object(gathered, results)
    return [summary(name, [each[name] for each in gathered]) for name in results]


def summary(name, ranks):
    if "missing" in ranks[0]:
        return {"name": name, "missing": ranks[0]["missing"]}
    found = {part: sum(each[part] for each in ranks) for part in ("wrong", "differ")}
    parts = ("dispatch", "combine")
    times = {f"{part}_us": bench.quantiles([us for each in ranks for us in each[part]]) for part in parts}
    both = [a + b for each in ranks for a, b in zip(each["dispatch"], each["combine"])]
    how = {key: ranks[0][key] for key in ("timed", "not_captured") if key in ranks[0]}
    if "host" in ranks[0]:
        hosts = {f"{part}_host_us": bench.quantiles([us for each in ranks for us in each["host"][part]]) for part in parts}
        times.update(hosts)
    return {"name": name, **found, "checked": ranks[0]["checked"], **how, **times, "both_us": bench.quantiles(both)}


BY = {"graph": "a graph", "events": "events, host waits included"}


def table(results):
    """Lines of a table in Markdown; on a GPU with the host's times beside those of the GPU."""
    on_gpu = any("dispatch_host_us" in each for each in results)
    heads = ["contender", "dispatch p50 / p95, µs", "combine p50 / p95, µs", "both p50, µs"]
    if on_gpu:
        heads += ["timed by", "host: dispatch p50, µs", "host: combine p50, µs"]
    heads.append("elements wrong")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in results:
        if "missing" in each:
            lines.append(f"| {each['name']} | {each['missing']} |" + " |" * (len(heads) - 2))
            continue
        cells = [each["name"], *(f"{each[p]['p50']:.1f} / {each[p]['p95']:.1f}" for p in ("dispatch_us", "combine_us"))]
        cells.append(f"{each['both_us']['p50']:.1f}")
        if on_gpu:
            cells += [BY[each["timed"]], *(f"{each[p]['p50']:.1f}" for p in ("dispatch_host_us", "combine_host_us"))]
        lines.append(f"| {' | '.join(cells)} | {each['wrong'] + each['differ']} |")
    return lines


def plot(results, title):
    """An SVG of bars: p50 of dispatch and combine of each contender that ran."""
    from xml.sax.saxutils import escape

    ran = [each for each in results if "missing" not in each]
    most = max((each["dispatch_us"]["p50"] + each["combine_us"]["p50"] for each in ran), default=1.0)
    high = 60 + 34 * len(ran)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{high}" font-family="sans-serif" font-size="13">',
             f'<rect width="860" height="{high}" fill="white"/>', f'<text x="10" y="20">{escape(title)}</text>',
             '<text x="10" y="40"><tspan fill="#2a6fbb">■ dispatch</tspan> <tspan fill="#d9822b">■ combine</tspan> p50, µs</text>']
    for place, each in enumerate(ran):
        y, x = 52 + 34 * place, 230.0
        lines.append(f'<text x="10" y="{y + 17}">{escape(each["name"])}</text>')
        for part, colour in (("dispatch_us", "#2a6fbb"), ("combine_us", "#d9822b")):
            wide = 500 * each[part]["p50"] / most
            lines.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="24" fill="{colour}"/>')
            x += wide
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 17}">{each["dispatch_us"]["p50"]:.1f} + {each["combine_us"]["p50"]:.1f}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def commit():
    done = subprocess.run(["git", "-C", HERE, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None


def rank_main(rank, args):
    if args.spawned:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(args.port))
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=args.timeout))
    results = measure(args, rank, device)
    dist.barrier()
    wrong, unwritten = sum(each.get("wrong", 0) + each.get("differ", 0) for each in results), 0
    if rank == 0:
        name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
        found = {"version": tokenyard.__version__, "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
                 "torch": torch.__version__, "device": args.device, "device_name": name, "cpus": os.cpu_count(), "dtype": "bf16",
                 **{o: getattr(args, o) for o in ("world", "tokens", "hidden", "experts", "top_k", "rounds", "iters", "warmup", "seed")},
                 "results": results}
        title = f"{args.world} ranks on {name}, {args.tokens} tokens, hidden {args.hidden}, {args.experts} experts, top {args.top_k}, bf16"
        unwritten = _program.say("compare.py", "\n".join([title, "", *table(results)]))
        for path, text in ((args.json, json.dumps(found, indent=1) + "\n"), (args.plot, plot(results, title))):
            if path:
                unwritten |= _program.write_file("compare.py", path, text)
    dist.destroy_process_group()
    if wrong or unwritten:
        sys.exit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in dict(world=2, tokens=128, hidden=7168, experts=256, top_k=8, rounds=4, iters=10, warmup=2, seed=1,
                              timeout=120).items():
        kind = bench.from_zero if name == "warmup" else bench.positive
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    args = parser.parse_args()
    args.spawned = "RANK" not in os.environ
    if not args.spawned:
        stated = os.environ.get("WORLD_SIZE", "")
        if not stated.isdecimal() or int(stated) == 0:
            parser.error(f"WORLD_SIZE is {stated!r}, and RANK is set: start with torchrun, or without its environment")
        args.world = int(stated)
    if args.experts % args.world or args.top_k > args.experts:
        parser.error(f"--experts is {args.experts}: give a multiple of the {args.world} ranks, and at least --top-k")
    if args.hidden % 8:
        parser.error(f"--hidden is {args.hidden}: give a multiple of 8")
    gpus = torch.cuda.device_count() if args.device == "cuda" else None
    if gpus is not None and gpus <= (args.world - 1 if args.spawned else int(os.environ.get("LOCAL_RANK", "0"))):
        parser.error(f"--device is cuda, and there are {gpus} GPUs: give each rank a GPU of its own, or --device cpu")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path and (args.spawned or os.environ["RANK"] == "0") and (why := _program.no_file(path)) is not None:
            parser.error(f"--{name} is {path!r}: {why}")
    if not args.spawned:
        return rank_main(int(os.environ["RANK"]), args)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        args.port = free.getsockname()[1]
    try:
        torch.multiprocessing.spawn(rank_main, (args,), nprocs=args.world)
    except torch.multiprocessing.ProcessExitedException as ended:
        # With status 1 a rank found something wrong, and the table has it.
        if ended.exit_code != 1:
            _program.complain("compare.py", f"rank {ended.error_index} ended: {ended}")
        sys.exit(1)


if __name__ == "__main__":
    main()
