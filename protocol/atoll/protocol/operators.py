"""Which operators a graph may call.

A peer executes nothing but ATen operators named here: enough to train transformers, convolutional and recurrent networks and
encoder-decoders. Left out on purpose: whatever reads files or memory it was not given (``from_file``, ``as_strided``,
``set_``), returns Python numbers (``item``), has results whose shape depends on data (``nonzero``, ``masked_select``), or
returns sparse or quantised tensors. Overloads that write to an ``out`` argument are never allowed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch._ops import OpOverload

from atoll.protocol.errors import GraphRefused

_POINTWISE = """
    abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atan2 atanh
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min clip
    conj conj_physical copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix float_power
    floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot i0 imag isfinite isinf isnan isneginf
    isposinf ldexp le lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor logit lt maximum minimum mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal polar polygamma
    positive pow rad2deg real reciprocal remainder resolve_conj resolve_neg round rsqrt rsub sgn sigmoid sign signbit sin sinc
    sinh special_erf special_erfc special_erfinv special_expit special_expm1 special_log1p special_xlog1py special_xlogy sqrt
    square sub subtract tan tanh threshold true_divide trunc view_as_complex view_as_real where xlogy complex
    __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ masked_fill
"""

_ACTIVATIONS = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid log_softmax mish prelu relu relu6 rrelu
    selu silu softmax softplus softshrink _softmax _log_softmax special_softmax special_log_softmax
"""

_REDUCTIONS = """
    all amax amin aminmax any argmax argmin argsort bucketize cosine_similarity count_nonzero cross cummax cummin cumprod cumsum
    diff dist dot inner kthvalue linalg_cross linalg_norm linalg_vector_norm logcumsumexp logsumexp max mean median min
    nanmean nanmedian nansum native_norm norm outer pairwise_distance pdist cdist prod renorm searchsorted sort std std_mean
    quantile nanquantile sum topk trace var var_mean frobenius_norm nuclear_norm msort
"""

_SHAPES = """
    alias atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to cat channel_shuffle chunk clone column_stack concat
    concatenate constant_pad_nd contiguous detach diag diag_embed diagonal diagonal_scatter dsplit dstack expand expand_as
    flatten flip fliplr flipud hsplit hstack kron lift_fresh lift_fresh_copy meshgrid moveaxis movedim narrow narrow_copy
    native_channel_shuffle numpy_T pad permute pixel_shuffle pixel_unshuffle ravel reflection_pad1d reflection_pad2d
    reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d reshape reshape_as roll rot90 row_stack
    select select_scatter slice slice_scatter split split_with_sizes squeeze stack swapaxes swapdims t tensor_split tile to
    _to_copy transpose tril triu type_as unbind unflatten unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze
    view view_as _unsafe_view _reshape_alias vsplit vstack copy fill zero
    adjoint diagonal_copy mT mH matrix_H
"""

_INDEXING = """
    embedding embedding_bag gather index index_add index_copy index_fill index_put index_reduce index_select _index_put_impl
    _embedding_bag
    masked_scatter one_hot scatter scatter_add scatter_reduce take take_along_dim _unsafe_index _unsafe_index_put
    _unsafe_masked_index repeat_interleave
"""

_CREATION = """
    arange empty empty_like empty_strided eye full full_like linspace logspace new_empty new_empty_strided new_full new_ones
    new_zeros ones ones_like scalar_tensor tril_indices triu_indices zeros zeros_like bartlett_window blackman_window
    hamming_window hann_window
"""

_RANDOM = """
    alpha_dropout bernoulli cauchy dropout exponential feature_alpha_dropout feature_dropout geometric log_normal multinomial
    native_dropout normal normal_functional poisson rand rand_like randint randint_like randn randn_like random randperm uniform
    binomial
"""

_LINEAR_ALGEBRA = """
    addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul einsum linalg_multi_dot linear matmul mm mv tensordot vdot
    linalg_matmul linalg_qr linalg_inv linalg_det linalg_slogdet linalg_solve linalg_cholesky linalg_householder_product
    scaled_dot_product_attention _scaled_dot_product_attention_math
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention rms_norm
    fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn
    fft_fftshift fft_ifftshift
"""

_LAYERS = """
    _convolution adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d avg_pool3d
    batch_norm col2im conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
    fractional_max_pool2d fractional_max_pool3d grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru gru_cell im2col
    instance_norm layer_norm lstm lstm_cell max_pool1d max_pool1d_with_indices max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d native_batch_norm
    _native_batch_norm_legit _native_batch_norm_legit_functional native_group_norm native_layer_norm rnn_relu rnn_relu_cell
    rnn_tanh rnn_tanh_cell upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm
    _weight_norm_interface norm_except_dim _trilinear _fused_rms_norm
"""

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss
    hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    multilabel_margin_loss_forward nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss
"""

_FUNCTIONAL = frozenset(
    " ".join(
        (_POINTWISE, _ACTIVATIONS, _REDUCTIONS, _SHAPES, _INDEXING, _CREATION, _RANDOM, _LINEAR_ALGEBRA, _LAYERS, _LOSSES)
    ).split()
)

# Operators of these packets return lists whose length follows from a size; validation bounds it before the call.
LIST_OPERATORS = frozenset(
    f"aten::{packet}"
    for packet in (
        *("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit", "unsafe_chunk"),
        *("unsafe_split", "unsafe_split_with_sizes", "meshgrid", "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d"),
    )
)

# `index` and `index_put` carry the tag of data-dependent shapes for boolean indices alone; validation meets those on meta
# tensors, where such a call fails. The others here have it for a call without `output_size`.
_SHAPES_KNOWN_ON_META = frozenset({"aten::index", "aten::_unsafe_index", "aten::repeat_interleave", "aten::one_hot"})


def allowed(packet: str) -> bool:
    """Whether the overloads of ``packet`` (``"linear"``, ``"add_"``) may be called at all."""
    if packet in _FUNCTIONAL:
        return True
    return packet.endswith("_") and not packet.endswith("__") and packet[:-1] in _FUNCTIONAL


@lru_cache(maxsize=4096)
def resolve(name: str) -> OpOverload:
    """The overload called ``name`` (``"aten.linear.default"``); raises GraphRefused when there is none or it is forbidden."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten" or not all(part.isidentifier() for part in parts):
        raise GraphRefused(f"{name!r} is not the name of an ATen overload such as aten.linear.default")
    if not allowed(parts[1]):
        raise GraphRefused(f"operator {name} is not allowed")
    packet = getattr(torch.ops.aten, parts[1], None)
    overload = getattr(packet, parts[2], None) if parts[2] in _overloads(packet) else None
    if not isinstance(overload, OpOverload):
        raise GraphRefused(f"operator {name} does not exist in this version of torch ({torch.__version__})")
    reason = _forbidden(overload)
    if reason:
        raise GraphRefused(f"operator {name} is not allowed: {reason}")
    return overload


def _overloads(packet: object) -> list[str]:
    names = getattr(packet, "overloads", None)
    return list(names()) if callable(names) else []


def _forbidden(overload: OpOverload) -> str:
    schema = overload._schema
    if any(argument.is_out for argument in schema.arguments):
        return "it writes to an out argument"
    results = [str(result.type) for result in schema.returns]
    lists = schema.name in LIST_OPERATORS
    if not results or any(kind != "Tensor" and not (lists and kind == "List[Tensor]") for kind in results):
        return "its results are not all tensors"
    if torch.Tag.data_dependent_output in overload.tags:
        return "its result is a number read from data"
    if torch.Tag.dynamic_output_shape in overload.tags and schema.name not in _SHAPES_KNOWN_ON_META:
        return "the shape of its result depends on data"
    return ""
