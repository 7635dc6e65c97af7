"""tokenyard as a backend of CollectiveX, InferenceX's comparison of dispatch and combine (experimental/CollectiveX).

CollectiveX drives a backend through `create_buffer`, `dispatch`, `stage`, `combine`, `recv_tokens`, `inspect_dispatch`
and `combine_transformed`. `TokenyardBackend` has these. Its base class is CollectiveX's `EPBackend` where that is importable,
as inside CollectiveX's `bench` folder. Otherwise a stand-in has the constructor and `make_problem`.

Mode "normal" has a row for each (token, rank) in the token layout. The caller applies weights, and combine adds the
rows of ranks. Mode "low-latency" has a row for each (token, expert) in the masked layout, and combine applies the
weights. Rows are bf16. Dispatch and combine wait for nothing on the host; outputs are made once for each problem.

CollectiveX's `run_ep.py` has a list of its backends, to which this class is to be added.
"""

import types

import torch

import tokenyard

try:
    from ep_backend import EPBackend
except ImportError:

    class EPBackend:
        """What `TokenyardBackend` uses of CollectiveX's base class."""

        SUPPORTED_MODES = ("normal",)

        def __init__(self, args, rank, world_size, local_rank, device):
            self.args, self.rank, self.world_size, self.local_rank, self.device = args, rank, world_size, local_rank, device
            self.mode = getattr(args, "mode", "normal")
            if self.mode not in self.SUPPORTED_MODES:
                raise ValueError(f"args.mode is {self.mode!r}: give one of {', '.join(self.SUPPORTED_MODES)}")

        def make_problem(self, T, idx, weights, x):
            """A problem of `T` tokens: rows, int64 choices and fp32 weights."""
            return types.SimpleNamespace(T=T, x=x, dispatch_x=x, topk_idx=idx.to(torch.int64), topk_weights=weights.float())


class TokenyardBackend(EPBackend):
    """Dispatch and combine of `tokenyard.AllToAll`."""

    name = "tokenyard"
    kernel_generation = f"tokenyard-{tokenyard.__version__}"
    maturity = "candidate"
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16",)
    stage_device_work = False
    roundtrip_only = False
    # A handle serves any number of combines, and a dispatch needs none. Versions of CollectiveX name this differently.
    requires_fresh_pair = False
    combine_needs_redispatch = False
    dispatch_needs_combine_cleanup = False
    # Each rank's part of a sum is rounded to bf16, and the parts are added in fp32.
    combine_reduction = "domain-fp32"

    def __init__(self, args, rank, world_size, local_rank, device):
        super().__init__(args, rank, world_size, local_rank, torch.device(device))
        self.low_latency = self.mode == "low-latency"
        rows = "token-expert" if self.low_latency else "token-rank"
        self.receive_layout = self.oracle_layout = self.payload_unit = rows
        self.combine_weight_semantics = "weighted-kernel-sum" if self.low_latency else "unweighted-rank-sum"
        self.layout = "masked" if self.low_latency else "token"
        self.ep = None

    def world(self):
        """The world of torch.distributed's default group."""
        return tokenyard.World.from_group()

    def create_buffer(self, spec):
        """Makes the context for `spec.max_tokens_per_rank` tokens of `spec.hidden` columns. Collective."""
        self.ep = tokenyard.AllToAll(self.world(), hidden=spec.hidden, experts=spec.experts, top_k=spec.topk,
                                     max_tokens_per_rank=spec.max_tokens_per_rank, device=str(self.device))

    def dispatch(self, problem):
        """Sends `problem.dispatch_x`; the handle has `got`, what came, until the problem's next dispatch."""
        if self.ep is None:
            raise RuntimeError("there is no buffer: call create_buffer first, on all ranks")
        made = getattr(problem, "tokenyard", None)
        # Outputs of another buffer may lack rows or experts.
        if made is None or made[0] is not self.ep:
            output, got = self.ep.output(problem.dispatch_x, layout=self.layout, also=[] if self.low_latency else ["row_count"])
            made = problem.tokenyard = (self.ep, output, got, torch.empty_like(problem.dispatch_x))
        _, output, got, out = made
        handle = self.ep.dispatch_into(output, problem.dispatch_x, problem.topk_idx, problem.topk_weights)
        return types.SimpleNamespace(got=got._replace(handle=handle), out=out, combine_input=None)

    def stage(self, problem, handle):
        """The rows that came are what combine sends: nothing is copied."""
        handle.combine_input = handle.got.rows

    def combine(self, problem, handle):
        """Sums `[T, hidden]` of the staged rows."""
        return self.ep.combine(handle.combine_input, handle.got.handle, handle.out)

    def recv_tokens(self, handle):
        """How many rows came. The host waits for them."""
        return int((handle.got.counts if self.low_latency else handle.got.also["row_count"]).sum().item())

    def _places(self, handle):
        """Expert and place of each row in the masked layout."""
        got = handle.got
        places = torch.arange(got.rows.shape[1], device=got.rows.device)
        return (places[None] < got.counts[:, None]).nonzero(as_tuple=True)

    def inspect_dispatch(self, problem, handle):
        """Rows that came, `payload` `[n, hidden]`, their experts' numbers, weights and `local_expert_counts`.

        `expert_ids` and `weights` are `[n, top_k]`, -1 and 0 where a choice is none of this rank. In the low-latency
        mode `expert_ids` is `[n]`, and rows have no weights.
        """
        got, numbers = handle.got, torch.tensor(self.ep.local_experts, device=handle.got.rows.device)
        counts = got.counts.long()
        if self.low_latency:
            expert, place = self._places(handle)
            return types.SimpleNamespace(payload=got.rows[expert, place], expert_ids=numbers[expert], local_expert_counts=counts)
        rows = self.recv_tokens(handle)
        local = got.token_experts[:rows].long()
        valid = local >= 0
        return types.SimpleNamespace(
            payload=got.rows[:rows], expert_ids=torch.where(valid, numbers[local.clamp(min=0)], -1),
            weights=got.token_weights[:rows].masked_fill(~valid, 0), local_expert_counts=counts,
            ordering_contract="tokenyard-source-rank-token-v1",
        )

    def combine_transformed(self, problem, handle, transformed):
        """Sums of `transformed` `[n, hidden]`, rows in the order of `inspect_dispatch`, in place of the staged ones."""
        rows = torch.full_like(handle.got.rows, float("nan"))
        if self.low_latency:
            rows[self._places(handle)] = transformed.to(rows.dtype)
        else:
            rows[: len(transformed)] = transformed.to(rows.dtype)
        handle.combine_input = rows
        return self.combine(problem, handle)
