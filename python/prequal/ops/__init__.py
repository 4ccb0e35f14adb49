"""Every op, a line each: the order in which tables list them."""

from .knn import knn as knn
from .knn import knn_gather as knn_gather
from .knn import knn_index as knn_index
from .knn import knn_interpolate as knn_interpolate
from .knn import radius as radius
from .rms_norm import rms_norm as rms_norm
