"""PPO for language models in one file: python examples/ppo_in_one_file.py (a minute on a CPU).

A small transformer learns to answer requests by imitation, and then by PPO from scores. The
mathematics is that of ``rlhf.algorithms``, as in runs of any size; all else stands here. As in the
paper (https://arxiv.org/abs/2203.02155), but for a rule in the place of the reward model.

Shapes: B = sequences, P = prompt tokens, T = response tokens, S = P + T, D = width, V = vocabulary.
"""

import copy
import random
import re
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlhf.algorithms.advantages import gae, token_rewards
from rlhf.algorithms.kl import estimate_kl
from rlhf.algorithms.masking import whiten
from rlhf.algorithms.ppo import policy_loss, value_loss
from rlhf.base.metrics import Moments
from rlhf.data.synthetic import SKILLS, prompt_of_request, rate_response
from rlhf.data.synthetic_pairs import draw_candidates

TASKS = ("copy", "repeat", "largest")  # "Which is the largest of 3 9 4 1?" -> "Sure! 9."
PROMPT_TOKENS, RESPONSE_TOKENS, WIDTH = 10, 10, 96
BATCH, SFT_STEPS, PPO_STEPS, PPO_EPOCHS, MINI_BATCHES = 128, 250, 40, 2, 2
KL_CTL, GAMMA, LAM, CLIPRANGE, CLIPRANGE_VALUE = 0.02, 1.0, 0.95, 0.2, 0.2
PAD, END = 0, 1


class Vocabulary:
    """Words and marks as tokens; a new word gets the next token."""

    def __init__(self) -> None:
        self.tokens = {"": PAD, "<end>": END}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        pieces = re.findall(r" ?\w+|[^\w ]", text)
        return [self.tokens.setdefault(piece, len(self.tokens)) for piece in pieces]

    def encode_prompts(self, requests: list[str]) -> Tensor:
        """Return the tokens (B, P) of requests, padded on the left."""
        rows = [self.encode(request) for request in requests]
        return torch.tensor([[PAD] * (PROMPT_TOKENS - len(row)) + row for row in rows])

    def decode(self, ids: list[int]) -> str:
        """Return the text of a response up to its end."""
        pieces = list(self.tokens)
        return "".join(pieces[i] for i in ids[: ids.index(END) if END in ids else None])


class Model(nn.Module):
    """A causal transformer with V outputs for each token as a policy, and one as a critic."""

    def __init__(self, vocabulary: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(PROMPT_TOKENS + RESPONSE_TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return the outputs (B, S, V or 1) at all tokens."""
        length = ids_BS.shape[1]
        hidden_BSD = self.embed(ids_BS) + self.positions.weight[:length]
        is_later_SS = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.head(self.layers(hidden_BSD, mask=is_later_SS))

    def predict_response(self, ids_BS: Tensor) -> Tensor:
        """Return the outputs (B, T, V or 1) before each token of the response."""
        return self(ids_BS)[:, PROMPT_TOKENS - 1 : -1]


def response_logprobs(policy: Model, ids_BS: Tensor) -> Tensor:
    """Return the log-probs (B, T) of the response's tokens."""
    logprobs_BTV = policy.predict_response(ids_BS).log_softmax(-1)
    return logprobs_BTV.gather(2, ids_BS[:, PROMPT_TOKENS:, None])[..., 0]


def kept_tokens(ids_BS: Tensor) -> Tensor:
    """Return which tokens of the response count (B, T): those up to its first end token."""
    is_end_BT = ids_BS[:, PROMPT_TOKENS:] == END
    return is_end_BT.cumsum(dim=1) - is_end_BT.long() == 0


def draw_requests(rng: random.Random) -> list[str]:
    """Return a batch of random requests."""
    return [SKILLS[rng.choice(TASKS)].draw_request(rng) for _ in range(BATCH)]


def update(model: Model, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take an optimizer step."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def imitate(policy: Model, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Supervised fine-tuning, on responses of mixed quality."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(SFT_STEPS):
        requests = draw_requests(rng)
        texts = [draw_candidates(prompt_of_request(request), rng)[0] for request in requests]
        rows = [vocabulary.encode(text) + [END] * RESPONSE_TOKENS for text in texts]
        responses_BT = torch.tensor([row[:RESPONSE_TOKENS] for row in rows])
        ids_BS = torch.cat([vocabulary.encode_prompts(requests), responses_BT], dim=1)
        update(policy, optimizer, -response_logprobs(policy, ids_BS)[kept_tokens(ids_BS)].mean())


@torch.no_grad()
def sample(policy: Model, ids_BS: Tensor) -> Tensor:
    """Return prompts (B, P) followed by sampled responses."""
    for _ in range(RESPONSE_TOKENS):
        ids_BS = torch.cat([ids_BS, policy(ids_BS)[:, -1].softmax(-1).multinomial(1)], dim=1)
    return ids_BS


def score(vocabulary: Vocabulary, requests: list[str], ids_BS: Tensor) -> Tensor:
    """Return the score (B,) in [0, 1] of each response: of the answer, its manners and its end."""
    scores = []
    for request, row in zip(requests, ids_BS[:, PROMPT_TOKENS:].tolist(), strict=True):
        prompt, text = prompt_of_request(request), vocabulary.decode(row)
        scores.append(rate_response(prompt, text, ended=END in row).gold)
    return torch.tensor(scores)


class Rollout(NamedTuple):
    """Prompts and responses, and what PPO learns from."""

    ids_BS: Tensor
    keep_BT: Tensor
    logprobs_BT: Tensor
    kl_BT: Tensor
    values_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor


@torch.no_grad()
def build_rollout(
    policy: Model, reference: Model, critic: Model, ids_BS: Tensor, scores_B: Tensor
) -> Rollout:
    """Return the advantages of the score at the end, and of the KL penalty at each token."""
    keep_BT = kept_tokens(ids_BS)
    logprobs_BT = response_logprobs(policy, ids_BS)
    kl_BT = estimate_kl(logprobs_BT, response_logprobs(reference, ids_BS), estimator="k1")
    values_BT = critic.predict_response(ids_BS)[..., 0]
    rewards_BT = token_rewards(kl_BT, scores_B, keep_BT, kl_ctl=KL_CTL)
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, keep_BT, gamma=GAMMA, lam=LAM)
    advantages_BT = whiten(advantages_BT, keep_BT, Moments.of(advantages_BT, keep_BT))
    return Rollout(ids_BS, keep_BT, logprobs_BT, kl_BT, values_BT, advantages_BT, returns_BT)


def cut_mini_batches(rollout: Rollout) -> list[Rollout]:
    """Return random parts of a rollout; each epoch has all of it."""
    parts = [rows for _ in range(PPO_EPOCHS) for rows in torch.randperm(BATCH).chunk(MINI_BATCHES)]
    return [Rollout(*(tensor[rows] for tensor in rollout)) for rows in parts]


def main() -> None:
    """Imitate, improve, and print every fifth step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # in products this small, threads mostly wait for each other
    rng, vocabulary = random.Random(0), Vocabulary()
    for request in [request for _ in range(40) for request in draw_requests(rng)]:
        vocabulary.encode(request + draw_candidates(prompt_of_request(request), rng)[0])
    words = len(vocabulary.tokens)
    policy, critic = Model(words, outputs=words), Model(words, outputs=1)
    imitate(policy, vocabulary, rng)
    reference = copy.deepcopy(policy)
    actor_optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    for step in range(PPO_STEPS + 1):
        requests = draw_requests(rng)
        ids_BS = sample(policy, vocabulary.encode_prompts(requests))
        scores_B = score(vocabulary, requests, ids_BS)
        rollout = build_rollout(policy, reference, critic, ids_BS, scores_B)
        for part in cut_mini_batches(rollout):
            given = (part.logprobs_BT, part.advantages_BT, part.keep_BT)
            logprobs_BT = response_logprobs(policy, part.ids_BS)
            actor_loss = policy_loss(logprobs_BT, *given, cliprange=CLIPRANGE).loss
            update(policy, actor_optimizer, actor_loss / part.keep_BT.sum())
            given = (part.values_BT, part.returns_BT, part.keep_BT)
            values_BT = critic.predict_response(part.ids_BS)[..., 0]
            critic_loss = value_loss(values_BT, *given, cliprange_value=CLIPRANGE_VALUE).loss
            update(critic, critic_optimizer, critic_loss / part.keep_BT.sum())
        if step % 5 == 0:
            said = vocabulary.decode(ids_BS[0, PROMPT_TOKENS:].tolist())
            kl = rollout.kl_BT[rollout.keep_BT].mean()
            print(f"step {step:2}: score {scores_B.mean():.3f}, KL {kl:.3f}, {requests[0]}{said}")


if __name__ == "__main__":
    main()
