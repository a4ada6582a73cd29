"""Which values of parameters a server takes: all that make sense, or those of the hosted API."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Limits and defaults of requests.

    Attributes:
      top_p_values: the only ones taken; None for all in (0, 1].
      has_penalties: presence and frequency penalties other than 0.
      has_extra_sampling: top_k, min_p and repetition_penalty.
      ignores_unknown: efforts that do not exist and the named form of tool_choice count as absent.
      default_effort: where a request that thinks names none; None leaves the note out.
    """

    name: str
    max_temperature: float
    default_top_p: float
    top_p_values: tuple[float, ...] | None = None
    has_penalties: bool = True
    has_extra_sampling: bool = True
    ignores_unknown: bool = False
    max_stops: int = 16
    max_stop_bytes: int = 1024
    max_completion_tokens: int = 1_048_576
    default_max_tokens: int = 131_072
    max_images: int = 16
    max_image_bytes: int = 128 * 2**20  # of all images of a request, as files
    max_image_tokens: int = 4 * 16_800  # of all images of a request: 600 MiB of patches
    default_effort: str | None = 'max'


RULES = {
    rules.name: rules
    for rules in (
        Rules(name='open', max_temperature=2.0, default_top_p=1.0),
        Rules(
            name='kimi',
            max_temperature=1.0,
            default_top_p=0.95,
            top_p_values=(0.95, 1.0),  # the model card's own evaluations use 1.0
            has_penalties=False,
            has_extra_sampling=False,
            ignores_unknown=True,
            max_stops=5,
            max_stop_bytes=32,
        ),
    )
}
