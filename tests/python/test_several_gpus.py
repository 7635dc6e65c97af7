"""A process for each GPU, over a group of torch.distributed: what only several GPUs show."""

import os
import subprocess
import sys

import pytest

from rig import the_torch
from rig import free_port

torch = the_torch()
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

PROCESS = """
import os, torch, torch.distributed as dist, tokenyard
from tokenyard import deep_ep, ops
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("gloo")
torch.manual_seed(1)
hidden, top_k, local, tokens = 1024, 4, 4, 64
experts = local * size
x_of = (torch.randn(size, tokens, hidden) * 4).round().div(4)
ids_of = torch.rand(size, tokens, experts).argsort(2)[:, :, :top_k]
w_of = torch.rand(size, tokens, top_k).mul(8).ceil().div(8)
x, ids, w = (of[rank].cuda() for of in (x_of, ids_of, w_of))

# DeepEP's interface: a rank returns its number plus one times each row.
buffer = deep_ep.Buffer(dist.group.WORLD)
for _ in range(3):
    of_rank, _, of_expert, named, event = buffer.get_dispatch_layout(ids, experts, async_finish=True)
    got, local_ids, weights, counts, handle, event = buffer.dispatch(
        x.bfloat16(), num_tokens_per_rank=of_rank, is_token_in_rank=named, num_tokens_per_expert=of_expert, topk_idx=ids,
        topk_weights=w, previous_event=event, async_finish=True, allocate_on_comm_stream=True)
    event.current_stream_wait()
    wanted = torch.cat([x_of[s][(ids_of[s] // local == rank).any(1)] for s in range(size)]).cuda().bfloat16()
    assert torch.equal(got, wanted)
    assert counts == [int((ids_of == rank * local + e).sum()) for e in range(local)]
    y, _, _ = buffer.combine(got.round() * (rank + 1), handle)
    factor = (named * torch.arange(1, size + 1, device="cuda")).sum(1, keepdim=True)
    assert torch.equal(y, (x.bfloat16().round() * factor).bfloat16())
    (rows, scales), count, handle, _, hook = buffer.low_latency_dispatch(x.bfloat16(), ids, tokens, experts, return_recv_hook=True)
    hook()
    back = rows.float().view(local, size * tokens, -1, 128) * scales[..., None]
    back = back.view(local, size * tokens, hidden).bfloat16()
    z, _, hook = buffer.low_latency_combine(back, ids, w, handle, return_recv_hook=True)
    hook()
    plain = x * w.sum(1, keepdim=True)
    # fp8 has a step of 2^-4 of the element, or of the block's largest 448th; sums are rounded to bf16.
    assert ((z.float() - plain).abs() <= (2.0**-4 + 2.0**-6) * plain.abs() + 2.0**-8 * w.sum(1, keepdim=True) * 16).all()
    assert count.tolist() == counts

# Operators, with gradients and in a graph.
ep = tokenyard.AllToAll(tokenyard.World.from_group(), hidden=hidden, experts=experts, top_k=top_k, max_tokens_per_rank=tokens,
                        dtype="fp32", combine_dtype="fp32", weights="none", dispatch_payload_words=2 * top_k,
                        payload_words=top_k, device="cuda")
xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
for _ in range(3):
    xs.grad = ws.grad = None
    got = ops.dispatch(ep, xs, ids, ws)
    y = ops.combine(got.rows * (rank + 1), got)
    y.sum().backward()
    factors = (ids // local + 1).float()
    wanted = x * (w * factors).sum(1, keepdim=True)
    assert ((y - wanted).abs() <= 2.0**-20 * (x.abs() * (w * factors).sum(1, keepdim=True))).all()
    assert ((xs.grad - (w * factors).sum(1, keepdim=True)).abs() <= 2.0**-20 * (w * factors).sum(1, keepdim=True)).all()
    terms = factors * x.abs().sum(1, keepdim=True)
    assert ((ws.grad - factors * x.sum(1, keepdim=True)).abs() <= 2.0**-14 * terms).all()
with torch.no_grad():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.dispatch(ep, x, ids, w)
        y = ops.combine(got.rows * 2.0, got)
    for step in range(20):
        x.copy_(x_of[rank].cuda() + step)
        graph.replay()
        wanted = 2 * x * w.sum(1, keepdim=True)
        assert ((y - wanted).abs() <= 2.0**-20 * 2 * x.abs() * w.sum(1, keepdim=True)).all()
torch.cuda.synchronize()
dist.barrier()
print("right", flush=True)
os._exit(0)
"""


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_process_for_each_gpu(ranks):
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    common = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": free_port()}
    started = [subprocess.Popen([sys.executable, "-c", PROCESS], env=common | {"RANK": str(r), "LOCAL_RANK": str(r)},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in range(ranks)]
    try:
        for rank in started:
            out, err = rank.communicate(timeout=120)
            assert rank.returncode == 0 and out == "right\n", err[-3000:]
    finally:
        for rank in started:
            rank.kill()
