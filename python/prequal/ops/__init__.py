"""Every op, a line each: the order in which tables list them."""

from .cross_entropy import cross_entropy_chunk_ as cross_entropy_chunk_
from .cross_entropy import cross_entropy_gradient_ as cross_entropy_gradient_
from .cross_entropy import cross_entropy_stats as cross_entropy_stats
from .cross_entropy import scale_unless_one_ as scale_unless_one_
from .fused_add_rms_norm import fused_add_rms_norm as fused_add_rms_norm
from .fused_add_rms_norm import fused_add_rms_norm_ as fused_add_rms_norm_
from .fused_add_rms_norm_quantize_fp8 import fused_add_rms_norm_quantize_fp8 as fused_add_rms_norm_quantize_fp8
from .geglu import geglu as geglu
from .geglu import geglu_ as geglu_
from .geglu import geglu_backward as geglu_backward
from .geglu import geglu_packed as geglu_packed
from .geglu import geglu_packed_backward as geglu_packed_backward
from .knn import knn as knn
from .knn import knn_gather as knn_gather
from .knn import knn_index as knn_index
from .knn import knn_interpolate as knn_interpolate
from .knn import radius as radius
from .layer_norm import layer_norm as layer_norm
from .layer_norm import layer_norm_backward as layer_norm_backward
from .linear_bias import linear_bias as linear_bias
from .linear_bias import linear_relu as linear_relu
from .linear_gelu import linear_gelu as linear_gelu
from .moe_permute import moe_permute as moe_permute
from .moe_route import moe_route as moe_route
from .moe_unpermute import moe_unpermute as moe_unpermute
from .moe_unpermute import moe_unpermute_backward as moe_unpermute_backward
from .qk_rms_norm_cross import qk_rms_norm_cross as qk_rms_norm_cross
from .qk_rms_norm_cross import qk_rms_norm_cross_backward as qk_rms_norm_cross_backward
from .qk_rms_norm_cross import qk_rms_norm_cross_inplace as qk_rms_norm_cross_inplace
from .qk_rms_norm_rope_qkv import qk_rms_norm_rope_qkv as qk_rms_norm_rope_qkv
from .qk_rms_norm_rope_qkv import qk_rms_norm_rope_qkv_backward as qk_rms_norm_rope_qkv_backward
from .qk_rms_norm_rope_qkv import qk_rms_norm_rope_qkv_inplace as qk_rms_norm_rope_qkv_inplace
from .quantize_fp8 import dequantize_fp8 as dequantize_fp8
from .quantize_fp8 import quantize_fp8 as quantize_fp8
from .rms_norm import rms_norm as rms_norm
from .rms_norm import rms_norm_backward as rms_norm_backward
from .rms_norm_quantize_fp8 import rms_norm_quantize_fp8 as rms_norm_quantize_fp8
from .rope import rope as rope
from .rope import rope_ as rope_
from .sparse_batch_mul_add import sparse_batch_mul_add as sparse_batch_mul_add
from .sparse_batch_mul_add import sparse_batch_mul_add_ as sparse_batch_mul_add_
from .sparse_batch_mul_add import sparse_batch_mul_add_backward as sparse_batch_mul_add_backward
from .sparse_gate_add_layer_norm_affine import sparse_gate_add_layer_norm_affine as sparse_gate_add_layer_norm_affine
from .sparse_gate_add_layer_norm_affine import (
    sparse_gate_add_layer_norm_affine_backward as sparse_gate_add_layer_norm_affine_backward,
)
from .sparse_layer_norm_affine import sparse_layer_norm_affine as sparse_layer_norm_affine
from .sparse_layer_norm_affine import sparse_layer_norm_affine_backward as sparse_layer_norm_affine_backward
from .swiglu import swiglu as swiglu
from .swiglu import swiglu_ as swiglu_
from .swiglu import swiglu_backward as swiglu_backward
from .swiglu import swiglu_packed as swiglu_packed
from .swiglu import swiglu_packed_backward as swiglu_packed_backward
from .swiglu_quantize_fp8 import swiglu_quantize_fp8 as swiglu_quantize_fp8
from .topk_rows import topk_rows_ as topk_rows_
