"""Which text each special id stands for: K3 and the models before it name the same slots otherwise.

Slot 0 is the first id after the last rank, 163584 in the releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_SPECIAL_TOKENS = 256
# Slots that mean the same in every model.
BOS, EOS, END_OF_MSG, EOT, PAD = 0, 1, 2, 9, 255

_COMMON = {
    BOS: '[BOS]',
    EOS: '[EOS]',
    EOT: '[EOT]',
    18: '<|media_begin|>',
    19: '<|media_content|>',
    20: '<|media_end|>',
    21: '<|media_pad|>',
    254: '[UNK]',
    PAD: '[PAD]',
}
K3_SLOTS = _COMMON | {
    END_OF_MSG: '<|end_of_msg|>',
    3: '<|open|>',
    4: '<|close|>',
    5: '<|sep|>',
    6: '[start_header_id]',
    7: '[end_header_id]',
    65: '<osagent_mode>',
}
# K2, K2.5, K2.6 and Kimi Linear.
K2_SLOTS = _COMMON | {
    END_OF_MSG: '<|im_end|>',
    3: '<|im_user|>',
    4: '<|im_assistant|>',
    6: '<|start_header_id|>',
    7: '<|end_header_id|>',
    10: '<|im_system|>',
    11: '<|tool_calls_section_begin|>',
    12: '<|tool_calls_section_end|>',
    13: '<|tool_call_begin|>',
    14: '<|tool_call_argument_begin|>',
    15: '<|tool_call_end|>',
    17: '<|im_middle|>',
    22: '<think>',
    23: '</think>',
}
_BEFORE_K3 = ('kimi_k2', 'kimi_k25', 'kimi_linear', 'deepseek_v3')  # K2's config says the last


def slots_of_model(config: Mapping[str, Any]) -> dict[int, str]:
    """Slot -> text for a release's `config.json`; K3's for a model that it does not know.

    An architecture named KimiK3... is K3 whatever its model_type says.
    """
    architectures = config.get('architectures') or ()
    if any('KimiK3' in str(name) for name in architectures):
        return K3_SLOTS
    return K2_SLOTS if config.get('model_type') in _BEFORE_K3 else K3_SLOTS
