"""The description of a decoder: its sizes, and the kinds of its parts."""

from dataclasses import dataclass

HIDDEN_UNIT = 64  # a gated MLP's default width is a multiple of this


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder is made of; the defaults are those of a small GPT-2."""

    vocab_size: int = 256
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 192
    n_kv_head: int | None = None  # key and value heads, each used by several query heads; None: n_head
    n_hidden: int | None = None  # hidden width of the MLP; None: 4 n_embd, or 8/3 of it, rounded up, if gated
    head_dim: int | None = None  # width of a head; None: n_embd / n_head
    family: str = "gpt2"  # the table by which it is written for others
    dropout: float = 0.0
    tied: bool = True  # head and embedding have the same weights
    scales_embedding: bool = False  # by the root of n_embd
    # norms
    has_rms_norms: bool = False
    norm_eps: float = 1e-5  # added to a norm's variance or mean square
    norm_offset: float = 0.0  # added to an RMSNorm's weights, which are initially 1 with it
    norms: str = "before"  # attention and MLP, "after" them, or "around": both
    has_qk_norms: bool = False  # of each head of queries and keys
    # biases
    bias: bool = False  # of all linear layers and norms
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's last layer
    mlp_bias: bool = False
    # attention
    layers: str = "full"  # kinds of consecutive layers, repeated: full, window, or unrotated
    window: int | None = None  # tokens to which one attends in a layer of that kind, itself included
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_size)
    # positions
    embeds_positions: bool = True  # or else rotates queries and keys by them
    rope_theta: float = 10000.0  # the slowest rotation's period is about 2 pi times this
    local_rope_theta: float | None = None  # of layers with a window, without rope_factor; None: as the others
    rope_scaling: str = "llama3"  # how rope_factor acts: llama3, linear, yarn
    rope_factor: float = 1.0  # by which slow rotations are slowed further, for longer contexts
    rope_original_length: int = 8192  # before scaling: rotations with longer periods are slow
    # MLP
    is_gated: bool = False
    activation: str = "gelu_tanh"
    num_experts: int = 0  # experts of a mixture in place of each MLP; 0: none
    experts_per_token: int = 2
    expert_capacity: float | None = None  # relative to an expert's mean load; None: no limit
    balance_loss: float = 0.0
    router: str = "sigmoid"  # scores, with a bias that balances the experts' load; or softmax, without
    normalizes_choices: bool = True  # the weights of a token's experts add up to 1

    @property
    def num_kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """The heads of q, k and v."""
        return self.n_head, self.num_kv_heads, self.num_kv_heads

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def hidden_width(self) -> int:
        """The width of the MLP.

        >>> ModelConfig(n_embd=192).hidden_width, ModelConfig(n_embd=192, is_gated=True).hidden_width
        (768, 512)
        """
        default = -(-8 * self.n_embd // (3 * HIDDEN_UNIT)) * HIDDEN_UNIT if self.is_gated else 4 * self.n_embd
        return self.n_hidden or default

    @property
    def layer_kinds(self) -> list[str]:
        """The kind of each layer.

        >>> ModelConfig(n_layer=5, layers="window full").layer_kinds
        ['window', 'full', 'window', 'full', 'window']
        """
        kinds = self.layers.split()
        return [kinds[number % len(kinds)] for number in range(self.n_layer)]

    def window_of(self, number: int) -> int | None:
        """Return the window of a layer."""
        return self.window if self.layer_kinds[number] == "window" else None
