"""Which attention kernel a stack of layers uses."""

from maelm_composer.config import AttentionBackend
from maelm_composer.errors import InputError

MIN_FLEX_HEAD_SIZE = 16  # FlexAttention's GPU kernels refuse narrower heads (torch 2.7)


def choose_backend(
    requested: AttentionBackend, device_type: str, dropout: float, is_plain_self_attention: bool, head_size: int
) -> AttentionBackend:
    """The kernel that is ``requested``; for ``auto``, the fastest one that the stack can use.

    On a CPU two matrix products are fastest: SDPA is slow once its bias needs a gradient, and FlexAttention has no
    backward pass, so that ``flex`` stores its bias. FlexAttention needs bidirectional self-attention alone
    (``is_plain_self_attention``) without dropout and, on a GPU, heads at least 16 wide; other stacks use SDPA on a GPU.

    Raises:
        InputError: the stack cannot use the requested ``flex``.
    """
    can_flex = is_plain_self_attention and not dropout and (device_type == 'cpu' or head_size >= MIN_FLEX_HEAD_SIZE)
    if requested is AttentionBackend.flex and not can_flex:
        raise InputError(
            'training.attention flex needs attention_probs_dropout_prob 0, a decoder with bidirectional attention only '
            f'and, on a GPU, heads at least {MIN_FLEX_HEAD_SIZE} wide'
        )
    if requested is not AttentionBackend.auto:
        return requested
    if device_type == 'cpu':
        return AttentionBackend.dense
    return AttentionBackend.flex if can_flex else AttentionBackend.sdpa
