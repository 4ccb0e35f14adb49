"""Null context: what cross-attention answers to a condition of zeros, without computing it, in the very same bits.

Classifier-free guidance runs a denoiser once with its condition and once with zeros in its place. Where every value row
of a cross-attention is then one vector v (the bias of its value projection), the weights of its softmax, which sum to
one, cannot matter: each output row is v·W_O + b_O. That row is computed once, at a row count whose product rounds as
the reference's does, and broadcast as a view. Whether all of this holds here is measured, never assumed: `qualify`.
Source: the null-context part of the VARCO3D 2.0 article.
"""

from .condition import GuidedCondition as GuidedCondition
from .condition import NullCondition as NullCondition
from .condition import symbolic as symbolic
from .context import CANDIDATES as CANDIDATES
from .context import NullContext as NullContext
from .layer import CrossAttention as CrossAttention
from .report import LayerReport as LayerReport
from .report import NullContextReport as NullContextReport
