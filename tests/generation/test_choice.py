"""Which token comes next, against transformers' own processors."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mm.config.generate import Decoding
from mm.generation.choice import drawn_number, next_tokens, penalized, probabilities

VOCABULARY = 50


def decoding(**changes) -> Decoding:
    return Decoding(**{"max_new_tokens": 8, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0,
                       "stop_token_ids": (), "seed": 0, **changes})


def logits_of(seed: int, rows: int = 3) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 99), temperature=st.floats(0.1, 3), top_k=st.integers(0, 60), top_p=st.floats(0.01, 1))
def test_probabilities_equal_transformers(seed: int, temperature: float, top_k: int, top_p: float):
    logits, ids = logits_of(seed), torch.zeros(3, 1, dtype=torch.int64)
    expected = TemperatureLogitsWarper(temperature)(ids, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    found = probabilities(logits, decoding(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(found, expected.softmax(dim=1))


@given(seed=st.integers(0, 99), penalty=st.floats(0.5, 2))
def test_the_penalty_equals_transformers(seed: int, penalty: float):
    logits = logits_of(seed)
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(seed))
    was_there = torch.zeros(3, VOCABULARY, dtype=torch.bool).scatter_(1, ids, True)
    assert torch.equal(penalized(logits, was_there, penalty), RepetitionPenaltyLogitsProcessor(penalty)(ids, logits))


def test_greedy_takes_the_likeliest():
    logits = logits_of(1)
    assert torch.equal(next_tokens(logits, decoding(temperature=0.0), [0, 1, 2], [0, 0, 0]), logits.argmax(1))


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([[0.0, 1.0, float("-inf"), 2.0]])
    drawn = torch.cat([next_tokens(logits, decoding(), [prompt], [position])
                       for prompt in range(100) for position in range(100)])
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    # one standard deviation is 0.005 at most; largest difference with these 10,000 numbers: 0.0056
    assert (shares - logits.softmax(1)[0]).abs().max() < 0.015
    assert shares[2] == 0


def test_a_row_draws_the_same_alone_and_in_a_batch():
    logits = logits_of(2, rows=5)
    together = next_tokens(logits, decoding(seed=3), [4, 0, 7, 2, 9], [1, 2, 3, 4, 5])
    for row, (prompt, position) in enumerate(zip([4, 0, 7, 2, 9], [1, 2, 3, 4, 5], strict=True)):
        assert next_tokens(logits[row : row + 1], decoding(seed=3), [prompt], [position]) == together[row]


@given(st.tuples(*[st.integers(0, 2**40)] * 3))
def test_numbers_are_in_the_half_open_interval(place: tuple[int, int, int]):
    assert 0 <= drawn_number(*place) < 1


def test_numbers_depend_on_seed_prompt_and_position():
    places = [(seed, prompt, position) for seed in range(5) for prompt in range(5) for position in range(5)]
    assert len({drawn_number(*place) for place in places}) == len(places)
    assert drawn_number(1, 2, 3) == drawn_number(1, 2, 3)
