"""Which token comes next: transformers' rules, and random numbers that depend on seed, prompt and position alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from mm.config.generate import Decoding
from mm.generation.decode import drawn_number, next_tokens, penalized, probabilities

VOCABULARY = 50


def decoding(**changes) -> Decoding:
    return Decoding(**{"max_new_tokens": 8, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0,
                       "stop_token_ids": (), "seed": 0, **changes})


def logits_of(seed: int, rows: int = 3) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 99), penalty=st.floats(0.5, 2))
def test_the_penalty_equals_transformers(seed: int, penalty: float):
    logits = logits_of(seed)
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(seed))
    was_there = torch.zeros(3, VOCABULARY, dtype=torch.bool).scatter_(1, ids, True)
    assert torch.equal(penalized(logits, was_there, penalty), RepetitionPenaltyLogitsProcessor(penalty)(ids, logits))


def test_greedy_takes_the_likeliest():
    logits = logits_of(1)
    assert torch.equal(next_tokens(logits, decoding(temperature=0.0), [0, 1, 2], [0, 0, 0]), logits.argmax(1))


def test_which_tokens_may_be_drawn():
    logits = torch.tensor([[0.0, 1.0, float("-inf"), 2.0]])
    hot = probabilities(logits, decoding(temperature=2.0))
    assert torch.equal(hot, (logits / 2).softmax(1))
    assert (probabilities(logits, decoding(top_k=2)) > 0).tolist() == [[False, True, False, True]]
    assert (probabilities(logits, decoding(top_p=0.5)) > 0).tolist() == [[False, False, False, True]]


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


def test_numbers_depend_on_seed_prompt_and_position():
    numbers = [drawn_number(*place) for place in torch.cartesian_prod(*[torch.arange(5)] * 3).tolist()]
    assert len(set(numbers)) == 125 and all(0 <= number < 1 for number in numbers)
