"""Kept keys and values: a token that comes alone sees what it would see in the whole sequence."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mm.device.attention import Segments
from mm.device.cpu import cpu_attention
from mm.device.device import Device

Device.pick("cpu")  # before megatron is imported

from mm.model.layers.attention import KeyValueCache, Places, attend_to_kept  # noqa: E402

HEADS, GROUPS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")


def rows(num_rows: int, heads: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(num_rows, heads, WIDTH, generator=generator)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), num_new=st.integers(1, 4), seed=st.integers(0, 99))
def test_token_by_token_is_the_whole_at_once(lengths: list[int], num_new: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    whole = [[rows(length + num_new, heads, generator) for heads in (HEADS, GROUPS, GROUPS)] for length in lengths]
    segments = Segments.build([length + num_new for length in lengths], lambda one: one)
    expected = cpu_attention(*(torch.cat([one[i] for one in whole]) for i in range(3)), segments=segments, causal=True)
    expected = expected.split(list(segments.lengths))

    cache = KeyValueCache(["7"], GROUPS, torch.empty(WIDTH))
    prompts = Segments.build(lengths, lambda one: one)
    first = cache.during(Places.of_sequences(lengths, CPU))["7"].attend(
        cpu_attention, *(torch.cat([one[i][:length] for one, length in zip(whole, lengths, strict=True)])
                         for i in range(3)), segments=prompts, causal=True)
    for found, wanted, length in zip(first.split(lengths), expected, lengths, strict=True):
        assert torch.allclose(found, wanted[:length], atol=1e-5)  # largest difference in 100 examples: 9.5e-7
    alone = Segments.build([1] * len(lengths), lambda one: one)
    for step in range(num_new):
        places = Places.of_new_tokens([length + step + 1 for length in lengths], CPU)
        q, k, v = (torch.stack([one[i][length + step] for one, length in zip(whole, lengths, strict=True)])
                   for i in range(3))
        found = cache.during(places)["7"].attend(cpu_attention, q, k, v, alone, True)
        wanted = torch.stack([one[length + step] for one, length in zip(expected, lengths, strict=True)])
        assert torch.allclose(found, wanted, atol=1e-5)


def test_more_room_keeps_what_is_there_and_other_slots_are_forgotten():
    generator = torch.Generator().manual_seed(0)
    cache = KeyValueCache(["0"], GROUPS, torch.empty(WIDTH))
    lengths = [3, 300, 5]
    kept = cache.during(Places.of_sequences(lengths, CPU))["0"]
    k = rows(sum(lengths), GROUPS, generator)
    kept.attend(cpu_attention, rows(sum(lengths), HEADS, generator), k, k,
                Segments.build(lengths, lambda one: one), True)
    cache.keep([2, 1])
    grown = cache.during(Places.of_new_tokens([6, 5000], CPU))["0"]
    assert grown.keys.shape[0] == 2 and grown.keys.shape[2] >= 5000
    assert torch.equal(grown.keys[0, :, :5].transpose(0, 1), k[303:])
    assert torch.equal(grown.values[1, :, :300].transpose(0, 1), k[3:303])


def test_what_is_beyond_the_end_is_not_seen():
    generator = torch.Generator().manual_seed(1)
    q, keys, values = (torch.randn(2, *shape, generator=generator) for shape in
                       ((HEADS, WIDTH), (GROUPS, 6, WIDTH), (GROUPS, 6, WIDTH)))
    lengths = torch.tensor([2, 6])
    found = attend_to_kept(q, keys, values, lengths)
    keys[0, :, 2:], values[0, :, 2:] = 1e4, 1e4
    assert torch.equal(attend_to_kept(q, keys, values, lengths), found)
