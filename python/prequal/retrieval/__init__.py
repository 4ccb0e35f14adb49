"""Search of a corpus of vectors: torch's matrix products over tiles of it, and `topk_rows_` after each. Distances of
all rows of two sets, and what is near."""

from .corpus_index import CorpusIndex as CorpusIndex
from .pairwise import pairwise_distance as pairwise_distance
from .pairwise import pairwise_within as pairwise_within
from .topk import cosine_topk as cosine_topk
