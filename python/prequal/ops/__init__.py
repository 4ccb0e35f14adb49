"""Every op, a line each: the order in which tables list them."""

from .fused_add_rms_norm import fused_add_rms_norm as fused_add_rms_norm
from .fused_add_rms_norm import fused_add_rms_norm_ as fused_add_rms_norm_
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
from .rms_norm import rms_norm as rms_norm
from .rms_norm import rms_norm_backward as rms_norm_backward
from .rope import rope as rope
from .rope import rope_ as rope_
from .swiglu import swiglu as swiglu
from .swiglu import swiglu_ as swiglu_
from .swiglu import swiglu_backward as swiglu_backward
from .swiglu import swiglu_packed as swiglu_packed
from .swiglu import swiglu_packed_backward as swiglu_packed_backward
