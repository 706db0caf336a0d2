"""Parameters and floating-point operations of a recipe, from its config alone (no torch)."""

from maelm_composer.config import DecoderConfig, ModelConfig

# Size of the first axis, which FSDP2 divides among the ranks, and the product of the other axes. A linear layer's
# weight and bias, and those of a LayerNorm behind it, share the first axis and are one entry: (outputs, inputs + 1),
# or (outputs, inputs + 3) with the LayerNorm.
Parameter = tuple[int, int]


def list_parameters(config: ModelConfig) -> dict[str, list[list[Parameter]]]:
    """Parameters of the encoder (with the token table), the decoder and the head.

    Each part is a list of groups: the parameters outside the layers, then one group for each layer.
    """
    size, decoder = config.hidden_size, config.decoder
    embeddings = [(config.vocab_size, size), (config.max_seq_len, size), (size, 2)]
    bias = (config.relative_position_buckets, config.num_attention_heads)
    parts = {'encoder': [[*embeddings, bias], *config.num_hidden_layers * [_list_layer(config, num_attentions=1)]]}
    head_size = size
    if decoder is not None:
        head_size = decoder.hidden_size
        own = [(config.max_seq_len, head_size), (head_size, 2)]
        attention = decoder.attention
        if attention.has_self_attention:
            own.append((decoder.relative_position_buckets, decoder.num_attention_heads))
        if head_size != size:
            own.append((head_size, size + 1))
        num_attentions = attention.has_self_attention + attention.has_cross_attention
        parts['decoder'] = [own, *decoder.num_hidden_layers * [_list_layer(decoder, num_attentions)]]
    parts['head'] = [[(head_size, head_size + 3), (config.vocab_size, 1)]]
    if head_size != size:
        parts['head'][0].append((size, head_size))  # back to the token table's width
    return parts


def _list_layer(stack: ModelConfig | DecoderConfig, num_attentions: int) -> list[Parameter]:
    size, inner = stack.hidden_size, stack.intermediate_size
    attention = [(3 * size, size + 1), (size, size + 3)]
    return num_attentions * attention + [(inner, size + 1), (size, inner + 3)]


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Trainable numbers in the encoder (with the token table), the decoder and the head."""
    parts = list_parameters(config).items()
    return {name: sum(first * rest for group in groups for first, rest in group) for name, groups in parts}


def count_forward_flops(config: ModelConfig, visible: int, masked: int) -> dict[str, int]:
    """FLOPs (2 for a multiply-add) of the forward pass of one row; a training step costs three times as many.

    The encoder sees S = ``visible`` tokens, and M = ``masked`` positions are predicted. The last layer before the head
    has M queries.
    """
    size, layers, decoder = config.hidden_size, config.num_hidden_layers, config.decoder
    head_size = size if decoder is None else decoder.hidden_size
    head = masked * (2 * head_size**2 + 2 * config.vocab_size * size + (2 * head_size * size) * (head_size != size))
    if decoder is None:
        encoder = (layers - 1) * _layer_flops(config, visible, visible) + _layer_flops(config, masked, visible)
        return {'encoder': encoder, 'decoder': 0, 'head': head}
    encoder = layers * _layer_flops(config, visible, visible)
    length, depth = config.max_seq_len, decoder.num_hidden_layers
    has_memory = decoder.attention.has_cross_attention
    if not decoder.attention.has_self_attention:
        cost = depth * _layer_flops(decoder, masked, visible)
    else:
        cost = (depth - 1) * _layer_flops(decoder, length, length) + _layer_flops(decoder, masked, length)
        if has_memory:
            cost += (depth - 1) * _attention_flops(decoder, length, visible)
            cost += _attention_flops(decoder, masked, visible)
    if decoder.hidden_size != size:
        memory = visible if has_memory else 0
        cost += 2 * (length + memory) * size * decoder.hidden_size
    return {'encoder': encoder, 'decoder': cost, 'head': head}


def _attention_flops(stack: ModelConfig | DecoderConfig, queries: int, keys: int) -> int:
    size = stack.hidden_size
    return 4 * (queries + keys) * size**2 + 4 * queries * keys * size


def _layer_flops(stack: ModelConfig | DecoderConfig, queries: int, keys: int) -> int:
    return _attention_flops(stack, queries, keys) + 4 * queries * stack.hidden_size * stack.intermediate_size
