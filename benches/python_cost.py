"""What calls through the Python package cost on a GPU: the host's time of eager calls, and a graph's replay.

    python3 benches/python_cost.py [--ranks 1,2] [--calls 2000] [--tokens 128] [--replays 300] [--json FILE] [--device cpu]

A rank is a thread; all share one GPU. The host's time is that around a call, the device's work excluded: calls of a kind go
sixteen times in a row, one kind after the other, and between them the host waits for the device outside of the clock, so
that no call waits for room in the launch queue. Beside them: a launch of torch's smallest kernel, the same calls through
torch's operators in C, operators in C and in Python that do nothing, a call of torch that launches one small kernel, and one
that allocates. The graph holds a dispatch and a combine: benches/host_cost.rs replays the same one without Python. Beside
its replay stands what the program measures of the same shape (`bench --mode graph`), whose dispatch and combine are timed
apart.
DeepSeek-V3's shape: 7168 columns, 256 experts, 8 choices, fp8 rows with fp32 scales. The operators' rows are of the same
context; `deep_ep`'s are of low-latency calls, bf16 rows quantised on their way, with and without a hook.
Nothing is compared with a reference here: tests and `python -m tokenyard.bench` do that.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

# Before CUDA starts: kernels of ranks that share a GPU wait for one another, so their streams need hardware queues of
# their own, and no kernel may be loaded meanwhile.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch  # noqa: E402

import tokenyard  # noqa: E402
from tokenyard import _eager, _program, deep_ep, ops  # noqa: E402
from tokenyard.bench import in_threads, positive  # noqa: E402

SHAPE = dict(hidden=7168, experts=256, top_k=8)
# Calls between two waits for the device; each is a few launches, and the queue has room for a thousand.
BURST = 16
# An operator that does nothing, registered as those of the package are: what torch takes for any operator in Python.
EMPTY = torch.library.Library("tokenyard_cost", "FRAGMENT")
EMPTY.define("empty(Tensor x) -> Tensor")
EMPTY.impl("empty", lambda x: x, "CompositeExplicitAutograd")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks to measure, which divide the 256 experts")
    parser.add_argument("--calls", type=positive, default=2000)
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--replays", type=positive, default=300, help="100 or more")
    parser.add_argument("--json")
    parser.add_argument("--device", default="cuda:0", choices=["cuda:0", "cpu"], help="cpu: to try the script itself")
    args = parser.parse_args()
    words = args.ranks.split(",")
    if not all(word.isdecimal() and 0 < int(word) <= 64 and SHAPE["experts"] % int(word) == 0 for word in words):
        parser.error(f"--ranks is {args.ranks!r}: give numbers as in 1,2 that divide the {SHAPE['experts']} experts, up to 64")
    args.ranks = [int(word) for word in words]
    if args.replays < 100:
        parser.error(f"--replays is {args.replays}: give 100 or more, which are timed together")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device is {args.device}, and torch finds no GPU: give --device cpu")
    if args.json and (why := _program.no_file(args.json)) is not None:
        parser.error(f"--json is {args.json!r}: {why}")
    return args


class Rank:
    """A rank's context and arrays."""

    def __init__(self, world, args):
        draw = torch.Generator().manual_seed(world.rank)
        self.world, self.args, self.on_gpu = world, args, args.device != "cpu"
        # Blocks wait for those of other ranks: those of all ranks that share the GPU must fit at once, as in the program.
        # A rank has two contexts, with that of deep_ep.
        shared = self.on_gpu and world.size > 1
        sms = (torch.cuda.get_device_properties(0).multi_processor_count - 4) // (2 * world.size) if shared else None
        self.sms = sms
        self.ep = tokenyard.AllToAll(world, **SHAPE, max_tokens_per_rank=args.tokens, device=args.device, dtype="fp8",
                                     scales="fp32", sms=sms)
        self.x = torch.randn((args.tokens, SHAPE["hidden"]), generator=draw).to(torch.float8_e4m3fn).to(args.device)
        self.scales = torch.rand((args.tokens, SHAPE["hidden"] // 128), generator=draw).to(args.device)
        ids = [torch.randperm(SHAPE["experts"], generator=draw)[: SHAPE["top_k"]] for _ in range(args.tokens)]
        self.ids = torch.stack(ids).to(args.device)
        self.weights = torch.rand(self.ids.shape, generator=draw).to(args.device)
        self.output, self.got = self.ep.output(self.x)
        self.rows = torch.zeros(self.got.rows.shape, dtype=torch.bfloat16, device=args.device)
        self.out = torch.empty((args.tokens, SHAPE["hidden"]), dtype=torch.bfloat16, device=args.device)
        self.x16 = torch.randn((args.tokens, SHAPE["hidden"]), generator=draw).to(torch.bfloat16).to(args.device)
        self.ids64 = self.ids.long()
        places = (SHAPE["experts"] // world.size, world.size * args.tokens, SHAPE["hidden"])
        self.ll_rows = torch.zeros(places, dtype=torch.bfloat16, device=args.device)
        self.small = torch.zeros(1, device=args.device)

    def dispatch(self):
        return self.ep.dispatch(self.x, self.ids, self.weights, scales=self.scales)

    def dispatch_into(self):
        return self.ep.dispatch_into(self.output, self.x, self.ids, self.weights, scales=self.scales)

    def combine(self, handle):
        self.ep.combine(self.rows, handle, self.out)

    def wait(self):
        if self.on_gpu:
            torch.cuda.current_stream().synchronize()
        self.ep.check()

    def calls(self):
        """Groups of calls that are timed, by name. Each call has what the one before it returned, and returns what the next
        one of its group needs."""
        deep_ep.Buffer.low_latency_sms = self.sms
        buffer = deep_ep.Buffer(self.world, low_latency_mode=True)
        shape = (self.args.tokens, SHAPE["experts"])
        empty = torch.ops.tokenyard_cost.empty
        launch = (lambda _: torch.cuda._sleep(0)) if self.on_gpu else (lambda _: None)
        x, ids, weights, scales = self.x, self.ids, self.weights, self.scales
        room = self.ep.plan(0, "contiguous", 1, None)
        # Of torch 2.11 and later.
        dispatch, combine, into, sums_into = _eager._DISPATCH, _eager._COMBINE, _eager._DISPATCH_INTO, _eager._COMBINE_INTO
        operators = torch.ops.tokenyard
        got, given = self.got, ops.Dispatched(self.got.rows, self.got.counts, None, self.args.tokens)
        in_c = [
            {"its function": lambda _: dispatch(x, ids, weights, scales, room | 3)[0],
             "combine's function": lambda got: combine(self.rows, got[0], self.rows, self.args.tokens << 1)},
            {"into's function": lambda _: into(
                x, ids, weights, scales, got.rows, got.counts, got.scales, got.offsets, x, room | 15)[0][0],
             "combine into's function": lambda handle: sums_into(self.rows, handle, self.rows, self.out, 0)},
            {"an empty function": lambda _: dispatch(x, ids, weights, scales, 0)},
            {"its operator": lambda _: operators._dispatch.default._op(x, ids, weights, scales, room | 3)[0],
             "combine's operator": lambda got: operators._combine.default._op(
                 self.rows, got[0], self.rows, self.args.tokens << 1)},
            {"an empty operator in C": lambda _: operators._dispatch.default._op(x, ids, weights, scales, 0)},
        ] if _eager.DEFINED else []

        def combine_ll(found, **options):
            return buffer.low_latency_combine(self.ll_rows, self.ids64, weights, found[2], **options)[2]

        return [
            {"dispatch_into": lambda _: self.dispatch_into(), "combine": self.combine},
            {"dispatch": lambda _: self.dispatch()},
            {"ops.dispatch": lambda _: ops.dispatch(self.ep, x, ids, weights, scales=scales),
             "ops.combine": lambda got: ops.combine(self.rows, got)},
            *in_c,
            {"ops.dispatch_into": lambda _: ops.dispatch_into(
                self.ep, got.rows, got.counts, x, ids, weights, scales=scales, row_scales=got.scales,
                offsets=got.offsets),
             "ops.combine_into": lambda handle: ops.combine_into(self.out, self.rows, given._replace(handle=handle))},
            {"deep_ep LL dispatch": lambda _: buffer.low_latency_dispatch(self.x16, self.ids64, *shape),
             "deep_ep LL combine": combine_ll},
            {"deep_ep LL dispatch, hook": lambda _: buffer.low_latency_dispatch(self.x16, self.ids64, *shape, return_recv_hook=True),
             "its hook": lambda found: (found[4](), found)[1],
             "deep_ep LL combine, hook": lambda found: combine_ll(found, return_recv_hook=True),
             "combine's hook": lambda hook: hook()},
            {"an empty launch": launch},
            {"an empty operator": lambda _: empty(self.small)},
            {"torch add_": lambda _: self.small.add_(1.0)},
            {"torch empty": lambda _: torch.empty((1,), device=self.args.device)},
        ]

    def host_times(self):
        """Microseconds of each call, by name."""
        groups = self.calls()
        times = {name: [] for calls in groups for name in calls}
        clock = time.perf_counter_ns
        for block in range(max(1, self.args.calls // BURST) + 3):
            for calls in groups:
                self.wait()
                self.world.barrier()
                for _ in range(BURST):
                    found = None
                    for name, work in calls.items():
                        begin = clock()
                        found = work(found)
                        end = clock()
                        if block >= 3:
                            times[name].append(end - begin)
        self.wait()
        return {name: quantiles(values) for name, values in times.items()}

    def replay_time(self, lock):
        """Microseconds of a replay of dispatch and combine, on the device, and of the call that launches it, on the host."""
        stream = torch.cuda.current_stream()
        # Contexts of the calls above are gone on all ranks: freeing memory waits for all kernels of the GPU.
        self.world.barrier()
        self.combine(self.dispatch_into())
        self.wait()
        self.world.barrier()
        graph = torch.cuda.CUDAGraph()
        with lock, torch.cuda.graph(graph, capture_error_mode="relaxed"):
            handle = self.dispatch_into()
            self.combine(handle)
        self.world.barrier()
        host, bursts = [], []
        for burst in range(1 + self.args.replays // 100):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.wait()
            self.world.barrier()
            begin.record(stream)
            for _ in range(100):
                before = time.perf_counter_ns()
                graph.replay()
                host.append(time.perf_counter_ns() - before)
            end.record(stream)
            self.wait()
            bursts.append(begin.elapsed_time(end) * 10)
        del handle
        self.world.barrier()
        # The first hundred are to warm up.
        return {"device_us": statistics.median(bursts[1:]), "host_us": quantiles(host[100:])}


def quantiles(nanoseconds):
    ordered = sorted(nanoseconds)
    return {"p50": statistics.median(ordered) / 1000, "p99": ordered[len(ordered) * 99 // 100] / 1000}


def programs(ranks, args):
    """What the program measures in a graph: microseconds of dispatch and combine."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bench.json")
        command = [sys.executable, "-m", "tokenyard", "bench", "--device", "cuda", "--world", str(ranks), "--tokens", str(args.tokens)]
        subprocess.run([*command, "--mode", "graph", "--iters", str(args.replays), "--check", "first", "--json", path], check=True,
                       stdout=subprocess.DEVNULL)
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    found = found.get("results", [found])[0]
    return {"dispatch": found["dispatch_us"]["p50"], "combine": found["combine_us"]["p50"]}


def main():
    args = arguments()
    results = []
    for ranks in args.ranks:
        lock = threading.Lock()

        def work(world):
            # None leaves the current stream as it is.
            with torch.cuda.stream(torch.cuda.Stream(0) if args.device != "cpu" else None):
                rank = Rank(world, args)
                host = rank.host_times()
                replay = rank.replay_time(lock) if rank.on_gpu else None
                world.barrier()
                return host, replay

        host, replay = in_threads(ranks, work)[0]
        result = {"ranks": ranks, "tokens": args.tokens, "calls": args.calls, "host_us": host, "replay": replay}
        print(f"{ranks} rank{'s' if ranks > 1 else ''} of {args.tokens} tokens")
        for name, times in host.items():
            print(f"  host    {name:<26} p50 {times['p50']:8.1f} us   p99 {times['p99']:8.1f} us")
        if replay is not None:
            program = result["program_graph_us"] = programs(ranks, args)
            both = program["dispatch"] + program["combine"]
            print(f"  replay  both           p50 {replay['device_us']:8.1f} us on the device, "
                  f"p50 {replay['host_us']['p50']:.1f} us of the host")
            print(f"  program in a graph     p50 {both:8.1f} us ({program['dispatch']:.1f} + {program['combine']:.1f}, each from a "
                  "barrier to its end)")
        results.append(result)
    found = {"version": tokenyard.__version__, "torch": torch.__version__, "results": results}
    if args.device != "cpu":
        found["gpu"] = torch.cuda.get_device_name(0)
    return _program.write_file("python_cost.py", args.json, json.dumps(found, indent=1) + "\n") if args.json else 0


if __name__ == "__main__":
    _program.end_by_ctrl_c()
    sys.exit(main())
