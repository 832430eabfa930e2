"""Trains a byte-level BPE on a corpus's train documents and writes a tokenizer.json.

  python -m data.train_bpe --corpus=sotu --vocab=4096 --out=bpe.json \\
    --train_len=512 --min_test_tokens=17408 --test_docs=20

The split must be the one of the runs that will use the file, so give it their numbers: here those of
configs/base.py, 17408 = 32 x 512 + 16 x 64 (max_multiple x train_len + spans x targets). It depends on the
tokenizer itself, since lengths are counted in tokens: training is repeated on what is left until no held-out
document was seen.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable

from data import DataConfig, cache, corpora, tokenizers
from data.document import Document, Drawn
from data.split import TokenDocument, Tokens, draw_splits


def train(corpus_name: str, vocab_size: int, path: str, **sizes: int) -> str:
  """Writes `path`; returns what it became in words. `sizes` are those of `draw_splits`."""
  tokenizer: tokenizers.Tokenizer = tokenizers.Bytes()
  corpus, source = cache.find(corpus_name, tokenizer)
  documents = corpus.documents
  seen = {d.name for d in documents}

  def texts() -> Iterable[Document]:
    return corpora.texts(corpus_name, source.documents if isinstance(source, Drawn) else source.read())

  def length_of(document: Document) -> TokenDocument:
    """Its ids would fill a disk in every round, and only their number counts."""
    ids = tokenizer.encode(document.text)
    return TokenDocument(document.name, Tokens(ids[:0], 0, len(ids)), len(document.text))

  while True:
    allowed = {d.name for d in draw_splits(corpus, documents, corpus.group_n, **sizes).train}
    if seen <= allowed:
      ratio = corpus.n_bytes / sum(len(d.tokens) for d in documents)
      return f'{tokenizer.vocab_size} ids from {len(seen)} train documents, {ratio:.3f} bytes per token'
    seen &= allowed
    tokenizers.train_bpe((d.text for d in texts() if d.name in seen), vocab_size).save(path)
    tokenizer = tokenizers.BPE(path=path)
    documents = [length_of(document) for document in texts()]


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--corpus', default=DataConfig.corpus)
  parser.add_argument('--vocab', type=int, required=True, help='ids, BOS among them')
  parser.add_argument('--out', required=True, help='a new file')
  parser.add_argument('--train_len', type=int, required=True)
  parser.add_argument('--min_test_tokens', type=int, required=True, help='longest window and its targets')
  parser.add_argument('--test_docs', type=int, required=True)
  parser.add_argument('--validation_docs', type=int, default=DataConfig.validation_docs)
  args = parser.parse_args(argv)
  if os.path.exists(args.out):
    sys.exit(f'--out = {args.out!r} exists: a run may depend on it; choose a new file')
  folder = os.path.dirname(os.path.abspath(args.out))
  os.makedirs(folder, exist_ok=True)
  try:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
      path = os.path.join(scratch, 'tokenizer.json')
      facts = train(
        args.corpus,
        args.vocab,
        path,
        test_docs=args.test_docs,
        validation_docs=args.validation_docs,
        min_test_tokens=args.min_test_tokens,
        min_validation_tokens=args.train_len + 1,
      )
      os.rename(path, args.out)
  except ValueError as e:
    sys.exit(str(e))
  print(f'{args.out}: {facts}')


if __name__ == '__main__':
  main()
