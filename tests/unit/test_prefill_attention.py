"""Prefill's attention without a card: the host's numbers are the kernels' own, every visible token is met once, the bound on the roundings holds, and the
kernel that was measured faster is chosen."""

import dataclasses
import re
import types

import cardkit
import numpy as np
import pytest
from kernelmodels import MODELS, SEVEN, prefill_log

from nanoqwen.config import data_path
from nanoqwen.cuda import attention_plan as plan
from nanoqwen.cuda.compile import parse_resources
from nanoqwen.ladder import layouts

PAGE, QUERIES, SHARED_A_CTA = 16, 64, 227 * 1024


def header(name: str) -> str:
    return (data_path("kernels") / "prefill" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("model", MODELS)
def test_the_host_knows_the_shape_of_the_kernels(model):
    """Threads, shared memory, cluster and tiles, as the compiler sees them; and the assembler lets no product wait for itself, which it says in a warning."""
    dims, _ = MODELS[model]
    facts = (
        f"kAttentionThreads == {plan.ATTENTION_THREADS} && kStages == {plan.STAGES} && kStep == {plan.STEP} && kSpread == {plan.CLUSTER} && kPageTokens == {PAGE}",
        f"sizeof(AttentionShared) == {plan.attention_shared_bytes(dims)} && sizeof(TensorMap) == 128 && alignof(TensorMap) == 64",
        f"Part<1>::kTile == {plan.TILE[plan.PLAIN]} && Part<kSpread>::kTile == {plan.TILE[plan.SPREAD]}",
        "sizeof(AttentionShared::joined) <= sizeof(AttentionShared::keys) + sizeof(AttentionShared::values)",
    )
    text = header("attention.cu") + "".join(f"static_assert({fact});\n" for fact in facts)
    log = prefill_log(model, "attention.cu", text)
    use = parse_resources(log)
    assert set(use) == set(plan.ATTENTIONS) and "warning" not in log.lower() and "C75" not in log
    # setmaxnreg moves registers between warpgroups: what the launch gave all three is what the roles share.
    roles = {name: int(re.search(rf"{name} = (\d+)", header("attention_steps.cuh"))[1]) for name in ("kConsumerRegisters", "kProducerRegisters")}
    assert {u.registers * 3 for u in use.values()} == {2 * roles["kConsumerRegisters"] + roles["kProducerRegisters"]}
    assert plan.attention_shared_bytes(dims) <= SHARED_A_CTA


# ---------------------------------------------------------------------------------------------------------- index arithmetic


def swizzled(address):
    """wgmma's 128-byte swizzle: address bits 4-6 are changed by bits 7-9."""
    return address ^ ((address >> 7 & 7) << 4)


@pytest.mark.parametrize("dims", [64, 128])
def test_pages_land_where_the_products_look_for_them(dims):
    """A step of tokens as the cache stores them, box by box; then B as the two descriptors address it."""
    half_bytes = plan.STEP * 128
    tokens = np.random.default_rng(1).standard_normal((plan.STEP, dims)).astype(np.float16)
    stored = np.empty_like(tokens)
    for t in range(plan.STEP):  # kv_page.cuh: chunk c of a row lies at c ^ (token % 8)
        for i in range(dims):
            stored[t, (i // 8 ^ t % 8) * 8 + i % 8] = tokens[t, i]
    shared = np.zeros(dims // 64 * half_bytes // 2, np.float16)
    for page in range(plan.STEP // PAGE):
        for half in range(dims // 64):
            at = (half * half_bytes + page * PAGE * 128) // 2
            shared[at : at + PAGE * 64] = stored[page * PAGE : (page + 1) * PAGE, 64 * half : 64 * half + 64].reshape(-1)
    n, k = np.meshgrid(np.arange(plan.STEP), np.arange(16), indexing="ij")
    for step in range(dims // 16):  # keys: rows n of 128 bytes, eight of them 1024
        start = step // 4 * half_bytes + step % 4 * 32
        assert (shared[swizzled(start + n // 8 * 1024 + n % 8 * 128 + 2 * k) // 2] == tokens[n, 16 * step + k]).all()
    n, k = np.meshgrid(np.arange(dims), np.arange(16), indexing="ij")
    for step in range(plan.STEP // 16):  # values: 64 dimensions by 8 tokens are 1024 bytes
        start = step * PAGE * 128 + n // 64 * half_bytes
        assert (shared[swizzled(start + k // 8 * 1024 + k % 8 * 128 + 2 * (n % 64)) // 2] == tokens[16 * step + k, n]).all()


@pytest.mark.parametrize("dims, group", [(64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)])
def test_results_are_stored_in_the_order_of_the_next_product(dims, group):
    """store_row's places for every element of a row of four heads, against tiled_x's order."""
    x = np.full(4 * dims, -1)
    for head in range(4):
        for t in range(4):
            for tile in range(dims // 8):
                columns = [head * dims + 8 * i + 2 * t + np.arange(2) for i in range(dims // 8)]
                if group > dims:
                    position = layouts.x_places(columns[tile][:1], group)[0]
                    x[position : position + 2] = columns[tile]
                elif (inside := tile % (group // 8)) < (quarter := group // 32):
                    position = head * dims + (tile - inside) * 8 + 32 * inside + 8 * t
                    assert position % 8 == 0 and (x[position : position + 8] == -1).all()
                    x[position : position + 8] = np.concatenate([columns[tile + w * quarter] for w in range(4)])
    assert (x[layouts.x_places(np.arange(4 * dims), group)] == np.arange(4 * dims)).all()


@pytest.mark.parametrize("kernel", plan.ATTENTIONS)
def test_every_visible_token_is_met_once_and_every_stage_given_back(kernel):
    """The walk of Part and attend in attention_steps.cuh, for chunks at the edges of pages, steps and tiles, launched for the chunk or for more."""
    spread, size = kernel == plan.SPREAD, plan.TILE[kernel]
    for first in (0, 1, 15, 16, 17, 63, 64, 511, 4095):
        for n in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500):
            for tile in range(plan.attention_grid(kernel, SEVEN, n + 31)[1]):
                if tile * size >= n:
                    continue  # Part::empty
                steps = (first + min(n, (tile + 1) * size) - 1) // plan.STEP + 1
                seen: dict[int, list[int]] = {}
                for rank in range(plan.CLUSTER if spread else 1):
                    begin, to = (steps * rank // plan.CLUSTER, steps * (rank + 1) // plan.CLUSTER) if spread else (0, steps)
                    arrivals, turns = np.zeros(to - begin, int), [0, 0]
                    for warpgroup in range(2):
                        first_query = tile * size + (0 if spread else warpgroup * QUERIES)
                        needed = (first + min(n, first_query + QUERIES) - 1) // plan.STEP + 1 if first_query < n else 0
                        for k in range(warpgroup if spread else 0, to - begin, 2 if spread else 1):
                            arrivals[k] += 4
                            turns[warpgroup] += 1
                            if spread or to - 1 - k < needed:
                                for query in range(first_query, min(n, first_query + QUERIES)):
                                    seen.setdefault(query, []).append(to - 1 - k)
                    assert (arrivals == (4 if spread else 8)).all() and (spread or turns[0] == turns[1])
                for query in range(tile * size, min(n, (tile + 1) * size)):
                    assert len(set(seen[query])) == len(seen[query]) and set(range((first + query) // plan.STEP + 1)) <= set(seen[query])


# ---------------------------------------------------------------------------------------------------------------- roundings


def as_the_kernel_rounds(q, keys, values, first: int) -> np.ndarray:
    """Online softmax in float64 with the kernels' two roundings, steps from the last to the first; before the result is rounded. [m, H * D]"""
    rounded = q.astype(np.float16).astype(np.float64)
    out = np.empty_like(rounded)
    for i, row in enumerate(rounded):
        for head, one in enumerate(row):
            kv = head // (q.shape[1] // keys.shape[1])
            scores = keys[: first + i + 1, kv] @ one / np.sqrt(q.shape[2])
            top, total, sums = -np.inf, 0.0, np.zeros(q.shape[2])
            for begin in range((first + i) // plan.STEP * plan.STEP, -1, -plan.STEP):
                s = scores[begin : begin + plan.STEP]
                now = max(top, s.max())
                p, again = np.exp(s - now), np.exp(top - now)
                total, sums, top = total * again + p.sum(), sums * again + p.astype(np.float16).astype(np.float64) @ values[begin : begin + len(s), kv], now
            out[i, head] = sums / total
    return out.reshape(len(q), -1)


@pytest.fixture
def card_prefill(monkeypatch):
    with cardkit.played(monkeypatch):
        from nanoqwen.ladder import card_prefill

        yield card_prefill


@pytest.mark.parametrize("first, wide", [(0, 1), (300, 1), (2000, 1), (2000, 4), (700, 12)])
def test_the_bound_allows_what_two_roundings_do(card_prefill, first, wide):
    rng = np.random.default_rng(first + wide)
    q = rng.standard_normal((3, 4, 64)).astype(np.float32) * wide
    keys, values = (rng.standard_normal((first + 3, 2, 64)).astype(np.float16).astype(np.float64) for _ in range(2))
    expected, bound = card_prefill.rounded_attention(q, keys, values, first, 0.0)
    assert (np.abs(as_the_kernel_rounds(q, keys, values, first).astype(np.float16) - expected) <= bound).all()
    # The twin rounds q: with one that does not, wide scores are beyond any rounding of the shares.
    if wide == 12:
        from nanoqwen.ladder import twins

        assert (np.abs(twins.attention(q.astype(np.float64), keys, values, first) - expected) > bound).any()


def test_the_bound_is_reached(card_prefill):
    """Shares that are rounded the same way, nearly half a unit each: all tokens but the last, which is met first, have a key for which that happens."""
    grid = np.arange(-5.9, -5.2, 2.0**-8).astype(np.float16).astype(np.float64)
    p = np.exp(grid / 8)
    worst = grid[np.argmax((p - p.astype(np.float16)) / p)]
    q, keys, values = np.zeros((1, 1, 64), np.float32), np.zeros((400, 1, 64)), np.ones((400, 1, 64))
    q[0, 0, 0], keys[:-1, 0, 0] = 1, worst
    expected, bound = card_prefill.rounded_attention(q, keys, values, 399, 0.0)
    of_shares = bound - card_prefill.row_bound(expected, 0.0)
    assert (np.abs(as_the_kernel_rounds(q, keys, values, 399) - expected) > 0.9 * of_shares).all()


# ---------------------------------------------------------------------------------------------------------- plan and launch


#: (tokens, position): microseconds of a launch of the plain and of the spread kernel for the 7B on an H200.
MEASURED = {
    (16, 0): (3.2, 6.0), (64, 0): (3.7, 8.1), (128, 0): (5.3, 15.3), (256, 0): (7.3, 30.7), (512, 0): (11.9, 56.9), (64, 512): (10.4, 8.4), (16, 2000): (30.3, 11.4),
    (32, 16000): (219.1, 59.9), (64, 16000): (218.0, 60.5), (128, 16000): (260.5, 119.9), (512, 4096): (77.7, 160.8), (512, 16000): (270.7, 488.4),
    (16, 192): (5.8, 5.7), (16, 256): (6.4, 6.2), (16, 448): (9.2, 5.9), (64, 256): (6.6, 8.1), (100, 500): (13.1, 15.1), (100, 900): (19.3, 16.9), (128, 2000): (37.3, 25.7),
    (192, 3000): (50.7, 47.3), (256, 4000): (68.0, 77.0), (256, 16000): (251.0, 233.0), (500, 16000): (259.0, 467.0),
}  # fmt: skip


def test_the_kernel_that_was_measured_faster_is_chosen():
    """Or one that is slower by a few hundredths only: between the two lie crossings that no simple rule hits exactly."""
    for (n, position), times in MEASURED.items():
        chosen = times[plan.ATTENTIONS.index(plan.attention_kernel(SEVEN, n, position, 132))]
        assert chosen <= 1.04 * min(times), (n, position)


@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_that_begins_never_spreads_and_more_context_never_stops_it(model):
    dims, _ = MODELS[model]
    for length in (1, 16, 64, 128, 200, 256):
        chosen = [plan.attention_kernel(dims, length, position, 132) for position in range(0, 32768, 64)]
        assert chosen[0] == plan.PLAIN and chosen == sorted(chosen, key=plan.ATTENTIONS.index)
    assert plan.attention_kernel(dims, 1, 32767, 132) == plan.SPREAD
    if model == "7b":
        assert {plan.attention_kernel(dims, length, 32000, 132) for length in (512, 1024, 2048)} == {plan.PLAIN}


def test_grids_cover_a_launch():
    assert plan.attention_grid(plan.PLAIN, SEVEN, 129) == (28, 2) and plan.attention_grid(plan.SPREAD, SEVEN, 129) == (28, 3, plan.CLUSTER)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_map_describes_a_layer_s_pool(monkeypatch, head_dim):
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: the test extra brings it on Linux")
    import fakecard

    fakecard.Card().install(monkeypatch)
    from nanoqwen.cuda import tensor_map

    dims, asked = dataclasses.replace(SEVEN, head_dim=head_dim), []
    written = np.arange(16, dtype=np.uint64)

    def encode(*args):
        asked.append([getattr(a, "value", a) if not isinstance(a, list) else [int(x) for x in a] for a in args])
        return 0, types.SimpleNamespace(getPtr=lambda: written.ctypes.data)

    monkeypatch.setattr(tensor_map.driver, "cuTensorMapEncodeTiled", encode)
    monkeypatch.setattr(tensor_map, "check", lambda result: result[1])
    pool = np.zeros((6, PAGE * dims.kv_size), np.float16)
    made = tensor_map.TensorMap()
    made.point_at(types.SimpleNamespace(data=types.SimpleNamespace(ptr=4096), size=pool.size), dims)
    assert list(made.opaque) == written.tolist()
    _, rank, address, size, strides, box, steps, *_ = asked[0]
    assert (int(rank), address, size, strides) == (2, 4096, [head_dim, 6 * dims.num_kv_heads * PAGE], [2 * head_dim])
    assert (box, steps) == ([tensor_map.BOX_COLUMNS, PAGE], [1, 1])
