"""How well and how fast `--filter language=…` tells languages apart: whole documents of the shared corpora, and short beginnings of them.

python bench/language_filter.py SHARED_DATA
"""

import sys
import time
from itertools import islice
from pathlib import Path

from electra.data.corpus import Corpus
from electra.data.filters import FilterSettings, removed_by

TEXTS = {"en": "pretrain_en/wiki_en-00", "de": "de/de_wiki", "ko": "ko/ko_wiki", "ja": "ja/ja_wiki"}
MOST = 2000

if __name__ == "__main__":
    print(
        "| text | characters | documents | kept by language=en | de | ko | ja | documents/s |\n|---|---:|" + "---:|" * 6
    )
    for language, name in TEXTS.items():
        path = Path(sys.argv[1]) / f"{name}.jsonl.zst"
        whole = [text for text, continues in islice(Corpus([path]).read(), MOST) if not continues]
        removed_by(whole[0], FilterSettings(language=language))  # load
        for size in (1 << 20, 200, 50):
            texts = [text[:size] for text in whole]
            kept, began = [], time.perf_counter()
            for wanted in TEXTS:
                settings = FilterSettings(language=wanted)
                kept.append(sum(removed_by(text, settings) is None for text in texts) / len(texts))
            rate = len(TEXTS) * len(texts) / (time.perf_counter() - began)
            shares = " | ".join(f"{share:.2%}" for share in kept)
            print(f"| {language} | {'all' if size > 200 else size} | {len(texts):,} | {shares} | {rate:,.0f} |")
