"""Search of a corpus of vectors: torch's matrix products over tiles of it, and `topk_rows_` after each."""

from .corpus_index import CorpusIndex as CorpusIndex
from .topk import cosine_topk as cosine_topk
