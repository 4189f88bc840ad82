"""Poker model: a model's folder, such as `antiphon export` writes, plays seats of many hands side by side.

What a seat was told and replied is one conversation, as in a run. The keys and values of what it was asked
before are kept, so that a decision costs little more than the tokens of its own turn.

B hands, T tokens, L layers, H heads, D numbers of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, DynamicCache

from antiphon.core.config import RunConfig
from antiphon.environments.conversation import user
from antiphon.environments.poker.hand import Hand
from antiphon.environments.poker.table import read_action
from antiphon.models.rendering import Renderer

REPLY_TOKENS = 6
"""As `sampling.max_tokens` of examples/poker.yaml."""


@dataclass(slots=True)
class Talk:
    """What one seat of one hand was told and replied."""

    ids: list[int]
    asked: int
    """Tokens before the last reply."""
    kept: torch.Tensor
    """Keys and values of the first tokens, [T, L * 2 * H * D] float32."""


class PokerModel:
    """Acts for the seats whose turn it is; replies are sampled."""

    def __init__(self, folder: str) -> None:
        settings = {"path": folder, "renderer": "qwen3", "template_arguments": {"thinking_retention": "all"}}
        self.renderer = Renderer.load(RunConfig.model_validate({"model": settings}), turns=True)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        shape = self.model.config
        self.shape = shape.num_hidden_layers, 2, shape.num_key_value_heads, shape.head_dim
        self.talks = WeakKeyDictionary[Hand, dict[int, Talk]]()
        self.decisions = self.illegal = 0

    def __call__(self, hands: Sequence[Hand], random: np.random.Generator) -> list[str]:
        """Return an action for each hand; a reply that is none, or not a legal one, checks or folds."""
        talks, actions = [self.told(hand) for hand in hands], []
        replies = self.replies(talks, int(random.integers(2**62)))
        for hand, talk, reply in zip(hands, talks, replies, strict=True):
            talk.ids += [*reply, self.renderer.codec.end_token_id]
            action = read_action(self.renderer.codec.decode(reply), hand.legal())
            self.decisions, self.illegal = self.decisions + 1, self.illegal + (action is None)
            actions.append(action or hand.legal().passive)
        return actions

    def told(self, hand: Hand) -> Talk:
        """Tell the seat whose turn it is what it sees."""
        seat, talks = hand.actor or 0, self.talks.setdefault(hand, {})
        said = [user(hand.seen_by(seat))]
        if talk := talks.get(seat):
            talk.ids += self.renderer.following(talk.ids[: talk.asked], talk.ids[talk.asked :], said, ())
        else:
            nothing = torch.empty(0, int(np.prod(self.shape)))
            talk = talks[seat] = Talk([*self.renderer.opening(said, ())], 0, nothing)
        talk.asked = len(talk.ids)
        return talk

    def correct(self, hand: Hand, action: str) -> None:
        """Let the last reply of the seat whose turn it is have been another one."""
        codec, talk = self.renderer.codec, self.talks[hand][hand.actor or 0]
        talk.ids[talk.asked :] = [*codec.encode(action, add_special_tokens=False), codec.end_token_id]

    @torch.inference_mode()
    def replies(self, talks: Sequence[Talk], seed: int) -> list[list[int]]:
        """Sample what follows each conversation, without its end token, and keep what was worked out."""
        chance, end = torch.Generator().manual_seed(seed), self.renderer.codec.end_token_id
        kept = pad_sequence([talk.kept for talk in talks], True, 0.0, "left").unflatten(2, self.shape)
        cache = DynamicCache()
        for layer in range(self.shape[0]):
            cache.update(*kept[:, :, layer].permute(2, 0, 3, 1, 4), layer)
        old = pad_sequence([torch.ones(len(talk.kept)) for talk in talks], True, 0.0, "left")
        ids = pad_sequence([torch.tensor(talk.ids[len(talk.kept) :]) for talk in talks], True, -1, "left")
        mask, sampled = torch.cat([old > 0, ids >= 0], 1), list[torch.Tensor]()
        asked = mask
        while len(sampled) < REPLY_TOKENS and mask[:, -1].any():
            found = self.model(
                ids.clamp(min=0),
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                past_key_values=cache,
                logits_to_keep=1,
            )
            ids = found.logits[:, -1].softmax(-1).multinomial(1, generator=chance)
            sampled.append(ids)
            mask = torch.cat([mask, mask[:, -1:] & (ids != end)], 1)
        layers = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
        rows = layers[..., : asked.shape[1], :].permute(2, 4, 0, 1, 3, 5).flatten(2)  # [B, T, L * 2 * H * D]
        for talk, row, told in zip(talks, rows, asked, strict=True):
            talk.kept = row[told]
        made = torch.cat(sampled, 1).tolist()
        return [reply[: reply.index(end)] if end in reply else reply for reply in made]
