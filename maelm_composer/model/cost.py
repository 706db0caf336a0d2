"""Parameters and floating-point operations of a recipe, from its config alone (no torch)."""

from maelm_composer.config import DecoderAttention, DecoderConfig, ModelConfig


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Trainable numbers in the encoder (with the token table), the decoder and the head."""
    size, decoder = config.hidden_size, config.decoder
    counts = {
        'encoder': config.vocab_size * size
        + config.max_seq_len * size
        + 2 * size
        + config.relative_position_buckets * config.num_attention_heads
        + config.num_hidden_layers * _layer_parameters(config, num_attentions=1)
    }
    if decoder is not None:
        num_attentions = 2 if decoder.attention.name.endswith('_cross') else 1
        counts['decoder'] = (
            (config.max_seq_len + 2) * decoder.hidden_size
            + decoder.num_hidden_layers * _layer_parameters(decoder, num_attentions)
            + (0 if decoder.hidden_size == size else (size + 1) * decoder.hidden_size)
        )
        if decoder.attention is not DecoderAttention.cross:
            counts['decoder'] += decoder.relative_position_buckets * decoder.num_attention_heads
    head_size = size if decoder is None else decoder.hidden_size
    counts['head'] = (head_size + 3) * head_size + config.vocab_size + (0 if head_size == size else head_size * size)
    return counts


def _layer_parameters(stack: ModelConfig | DecoderConfig, num_attentions: int) -> int:
    size, inner = stack.hidden_size, stack.intermediate_size
    return num_attentions * (4 * size * size + 6 * size) + 2 * size * inner + inner + 3 * size


def count_forward_flops(config: ModelConfig, visible: int, masked: int) -> dict[str, int]:
    """Multiply-adds ×2 of one row's forward pass; a training step costs three times as much.

    Args:
        visible: S, tokens that the encoder sees
        masked: M, positions to predict

    What a layer need not compute is not counted: the last layer before the head has queries at M positions only.
    """
    size, decoder = config.hidden_size, config.decoder
    layers = config.num_hidden_layers
    head_size = size if decoder is None else decoder.hidden_size
    head = masked * (2 * head_size**2 + 2 * config.vocab_size * size + (2 * head_size * size) * (head_size != size))
    if decoder is None:
        encoder = (layers - 1) * _layer_flops(config, visible, visible) + _layer_flops(config, masked, visible)
        return {'encoder': encoder, 'decoder': 0, 'head': head}
    encoder = layers * _layer_flops(config, visible, visible)
    length, depth = config.max_seq_len, decoder.num_hidden_layers
    match decoder.attention:
        case DecoderAttention.cross:
            cost = depth * _layer_flops(decoder, masked, visible)
        case DecoderAttention.bidirectional:
            cost = (depth - 1) * _layer_flops(decoder, length, length) + _layer_flops(decoder, masked, length)
        case _:
            whole = _layer_flops(decoder, length, length) + _attention_flops(decoder, length, visible)
            last = _layer_flops(decoder, masked, length) + _attention_flops(decoder, masked, visible)
            cost = (depth - 1) * whole + last
    if decoder.hidden_size != size:
        memory = 0 if decoder.attention is DecoderAttention.bidirectional else visible
        cost += 2 * (length + memory) * size * decoder.hidden_size
    return {'encoder': encoder, 'decoder': cost, 'head': head}


def _attention_flops(stack: ModelConfig | DecoderConfig, queries: int, keys: int) -> int:
    size = stack.hidden_size
    return 4 * (queries + keys) * size**2 + 4 * queries * keys * size


def _layer_flops(stack: ModelConfig | DecoderConfig, queries: int, keys: int) -> int:
    return _attention_flops(stack, queries, keys) + 4 * queries * stack.hidden_size * stack.intermediate_size
