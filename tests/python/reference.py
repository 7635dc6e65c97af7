"""An independent reference of dispatch and combine for every format and layout, at f64, and inputs for it.

Tensors lie on the CPU here. Nothing of the package is used but its documented rules: expert e is on rank
e * ranks // experts, rows of an expert are in the order of (source rank, token), and docs/design.md defines quantisation
and the bound of combine's error.
"""

import numpy as np
import torch

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
LAYOUTS = ["contiguous", "masked", "token"]
# Elements, scales, and whether dispatch makes the fp8 rows.
FORMATS = [("bf16", None, False), ("fp16", None, False), ("fp32", None, False), ("fp8", None, False), ("fp8", "fp32", False),
           ("fp8", "ue8m0", False), ("fp8", "fp32", True), ("fp8", "ue8m0", True)]
# Half of the step between neighbours in [1, 2).
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
BLOCK = 128


def bits(tensor):
    """A tensor's elements as integers, so that NaNs and the sign of 0 count."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def equal(found, wanted):
    """Whether two tensors have the same bits."""
    return found.shape == wanted.shape and found.dtype == wanted.dtype and torch.equal(bits(found), bits(wanted))


def e4m3_values():
    """The values of codes 0 to 0x7e, by the format's definition: 4 exponent bits of bias 7, 3 mantissa bits."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def to_e4m3(values):
    """Codes of f32 values, to nearest even; beyond 448 the largest."""
    known, size = e4m3_values(), np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(known, size), 1, len(known) - 1)
    middle = (known[above - 1] + known[above]) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return np.where(up, above, above - 1).astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 7)


def quantised(x, scales):
    """The fp8 rows of bf16 rows without NaN or infinity, and their scales."""
    tokens, hidden = x.shape
    blocks = hidden // BLOCK
    values = x.float().cpu().numpy().reshape(tokens, blocks, BLOCK)
    largest = np.maximum(np.abs(values).max(2, initial=0), np.float32(1e-4)).astype(np.float64)
    if scales == "fp32":
        words = torch.from_numpy((largest / 448).astype(np.float32))
        inverse = (448 / largest).astype(np.float32)
    else:
        # The smallest power of two that is not below: found by trying all.
        powers = 2.0 ** (np.arange(255) - 127.0)
        exponents = (powers * 448 < largest[..., None]).sum(2)
        inverse = (2.0 ** (127.0 - exponents)).astype(np.float32)
        padded = np.zeros((tokens, -(-blocks // 4) * 4), dtype=np.uint8)
        padded[:, :blocks] = exponents
        words = torch.from_numpy(padded.view(np.int32))
    scaled = (values.astype(np.float64) * inverse[..., None].astype(np.float64)).astype(np.float32)
    rows = torch.from_numpy(to_e4m3(scaled).reshape(tokens, hidden)).view(torch.float8_e4m3fn)
    return rows.to(x.device), words.to(x.device)


class Job:
    """Tokens of each rank in one format, what each expert gets of them, and what comes back.

    Experts' rows are drawn for each (expert, source rank, token), so that no two experts or tokens can be exchanged
    unseen. `x`, `scales`: what a rank gives. `rows`, `words`: rows and scales as they travel.
    """

    def __init__(self, dtype="bf16", scales=None, quantize=False, ranks=2, hidden=640, experts=6, top_k=3, tokens=11, seed=1):
        draw = np.random.default_rng(seed)
        self.ranks, self.hidden, self.experts, self.top_k, self.tokens = ranks, hidden, experts, top_k, tokens
        self.dtype, self.combine_dtype = dtype, "bf16" if dtype == "fp8" else dtype
        self.limits = dict(hidden=hidden, experts=experts, top_k=top_k, max_tokens_per_rank=tokens, dtype=dtype, scales=scales,
                           quantize=quantize, combine_dtype=self.combine_dtype, timeout=20.0)
        # One rank with all tokens, one with some, and of three one with none.
        self.count = [tokens, max(tokens - 4, 1), 0][:ranks]
        self.ids = [self._choices(draw, n) for n in self.count]
        self.weights = [torch.from_numpy(draw.random((n, top_k), dtype=np.float32)) for n in self.count]
        self.x, self.scales, self.rows, self.words = [], [], [], []
        for n in self.count:
            self._draw_rows(draw, n, dtype, scales, quantize)
        self.of_expert = torch.from_numpy(draw.standard_normal((experts, ranks, tokens, hidden)).astype(np.float32))
        self.of_expert = self.of_expert.to(TYPES[self.combine_dtype])

    def _choices(self, draw, n):
        ids = np.argsort(draw.random((n, self.experts)), axis=1)[:, : self.top_k]
        ids[draw.random(ids.shape) < 0.1] = -1
        return torch.from_numpy(ids)

    def _draw_rows(self, draw, n, dtype, scales, quantize):
        blocks = -(-self.hidden // BLOCK)
        if dtype == "fp8" and not quantize:
            x = torch.from_numpy(draw.integers(0, 256, (n, self.hidden), dtype=np.uint8)).view(torch.float8_e4m3fn)
            words = torch.from_numpy(draw.random((n, blocks), dtype=np.float32)) if scales == "fp32" else None
            if scales == "ue8m0":
                words = torch.from_numpy(draw.integers(-(2**31), 2**31, (n, -(-blocks // 4)), dtype=np.int32))
            given, rows = words, x
        else:
            # Blocks of very different size, and one of zeros.
            size = 10.0 ** draw.integers(-6, 4, (n, blocks, 1))
            size[:, 0] *= draw.random((n, 1)) < 0.7
            x = (draw.standard_normal((n, blocks, BLOCK)) * size).reshape(n, self.hidden)
            x = torch.from_numpy(x.astype(np.float32)).to(TYPES["bf16" if quantize else dtype])
            given, (rows, words) = None, quantised(x, scales) if quantize else (x, None)
        self.x.append(x)
        self.scales.append(given)
        self.rows.append(rows)
        self.words.append(words)

    def experts_of(self, rank):
        """Numbers of a rank's experts."""
        return [e for e in range(self.experts) if e * self.ranks // self.experts == rank]

    def tokens_of(self, expert):
        """The tokens that an expert gets, as (source rank, token), in order."""
        return [(s, t) for s in range(self.ranks) for t in range(self.count[s]) if expert in self.ids[s][t]]

    def tokens_at(self, rank):
        """The tokens of which any expert is on a rank, in order."""
        own = self.experts_of(rank)
        return [(s, t) for s in range(self.ranks) for t in range(self.count[s]) if any(e in self.ids[s][t] for e in own)]

    def places(self, rank, layout, got):
        """Where each row of an output should be: (row, source rank, token, expert or None), rows of all experts in one.

        `got`: the output on the CPU, of which only offsets are used.
        """
        if layout == "token":
            return [(n, s, t, None) for n, (s, t) in enumerate(self.tokens_at(rank))]
        begins = got.offsets.tolist() if layout == "contiguous" else [i * got.rows.shape[1] for i in range(len(got.counts))]
        return [(begins[i] + n, s, t, e) for i, e in enumerate(self.experts_of(rank)) for n, (s, t) in enumerate(self.tokens_of(e))]

    def check_output(self, rank, layout, got, align=1):
        """An output on the CPU, element by element; rows beside those that come keep the bits that `got` was filled with.

        Returns the rows that are none of the call's.
        """
        own, wanted = self.experts_of(rank), [len(self.tokens_of(e)) for e in self.experts_of(rank)]
        assert got.counts.tolist() == wanted and got.counts.dtype == torch.int32, (got.counts, wanted)
        if layout == "contiguous":
            begins = [0]
            for rows in wanted:
                begins.append(begins[-1] + -(-rows // align) * align)
            assert got.offsets.tolist()[:-1] == begins[:-1], (got.offsets, begins)
        rows, places = got.rows.reshape(-1, self.hidden), self.places(rank, layout, got)
        assert rows.dtype == TYPES[self.dtype]
        others = torch.ones(len(rows), dtype=torch.bool)
        for n, s, t, e in places:
            assert equal(rows[n], self.rows[s][t]), (rank, layout, n, s, t, e)
            if got.scales is not None:
                assert equal(bits(got.scales.reshape(len(rows), -1)[n]), bits(self.words[s][t])), (rank, layout, n, s, t)
            others[n] = False
        if layout == "token":
            for n, s, t, _ in places:
                found = {(e, w) for e, w in zip(got.token_experts[n].tolist(), got.token_weights[n].tolist()) if e >= 0}
                pairs = zip(self.ids[s][t].tolist(), self.weights[s][t].tolist())
                assert found == {(own.index(e), w) for e, w in pairs if e in own}, (rank, n, s, t)
        return rows[others]

    def returned(self, rank, layout, got):
        """What a rank's experts make of its output: rows for combine, NaN where no row came."""
        places = self.places(rank, layout, got)
        rows = torch.full_like(got.rows, 0, dtype=TYPES[self.combine_dtype]).reshape(-1, self.hidden)
        rows[:] = float("nan")
        for n, s, t, e in places:
            rows[n] = self.of_expert[e, s, t] if e is not None else self.partial(rank, s, t)[0].to(rows.dtype)
        return rows.reshape(got.rows.shape)

    def partial(self, rank, source, token):
        """A rank's part of a token's sum, and the sum of its terms' magnitudes, at f64."""
        exact, terms = torch.zeros(2, self.hidden, dtype=torch.float64)
        for e, w in zip(self.ids[source][token].tolist(), self.weights[source][token].tolist()):
            if e >= 0 and e * self.ranks // self.experts == rank:
                term = w * self.of_expert[e, source, token].double()
                exact, terms = exact + term, terms + term.abs()
        return exact, terms

    def check_sums(self, rank, out, times=1, out_dtype=None):
        """Combined rows of a rank's tokens, on the CPU, within docs/design.md's bound; `times` the sum if accumulated."""
        unit, of_out = UNIT[self.combine_dtype], UNIT[out_dtype or self.combine_dtype]
        assert len(out) == self.count[rank] and out.dtype == TYPES[out_dtype or self.combine_dtype]
        for t in range(self.count[rank]):
            exact, terms, lost = torch.zeros(3, self.hidden, dtype=torch.float64)
            for owner in range(self.ranks):
                part, sizes = self.partial(owner, rank, t)
                exact, terms, lost = exact + part, terms + sizes, lost + unit * part.abs()
            bound = times * (lost + of_out * exact.abs() + (self.top_k + self.ranks + 2) * 2.0**-24 * terms)
            error = (out[t].double() - times * exact).abs()
            # Terms of second order.
            assert (error <= 1.02 * bound + 1e-30).all(), (rank, t, float((error / bound.clamp(min=1e-30)).max()))
