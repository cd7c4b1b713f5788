r"""A search server: BM25 over a corpus of short documents, with the requests and answers of Search-R1's retriever.

    pip install -r examples/search-r1/requirements.txt
    python examples/search-r1/search_server.py --port 8000

    POST /retrieve {"queries": ["deepest lake on Earth"], "topk": 3}
    → {"result": [[{"document": {"id": "lake-baikal", "contents": "\"Lake Baikal\"\nLake …"}, "score": 5.1}, …]]}

For each query the documents that share a word with it, the best first: ``topk`` of them at most (3 unless given).
``"return_scores": false`` leaves the scores out: then each entry is the document. ``GET /health`` says that it serves.
The corpus is JSON Lines of ``{"id": …, "contents": "\"title\"\ntext"}``, as Search-R1's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import sys
import unicodedata
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from aiohttp import web
from bm25s.stopwords import STOPWORDS_EN_PLUS

CORPUS = Path(__file__).with_name("corpus.jsonl")
MOST_QUERIES = 256
LONGEST_QUERY = 4096  # characters
MOST_DOCUMENTS = 100  # for one query
USUAL_DOCUMENTS = 3

Document = dict[str, str]


class BadRequestError(Exception):
    """A request that cannot be answered; says why in one line."""


class SearchIndex:
    """Documents and the BM25 scores of their words (bm25s' defaults: Lucene's BM25 with k1 1.5 and b 0.75).

    Args:
        documents: With ``id`` and ``contents`` each, at least one.
    """

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self._scorer = bm25s.BM25()
        self._scorer.index([words(document["contents"]) for document in documents], show_progress=False)

    def search(self, query: str, topk: int) -> list[tuple[Document, float]]:
        """The documents that match best, best first; of equal ones, the corpus's first."""
        known = [word for word in words(query) if word in self._scorer.vocab_dict]
        if not known:
            return []
        scores = self._scorer.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:topk]
        return [(self.documents[place], float(scores[place])) for place in best if scores[place] > 0]


def words(text: str) -> list[str]:
    """The words of a text in lower case, without accents and without words such as "the"."""
    plain = "".join(sign for sign in unicodedata.normalize("NFKD", text) if not unicodedata.combining(sign))
    return [word for word in re.findall(r"\w+", plain.lower()) if word not in STOPWORDS_EN_PLUS]


def read_corpus(path: Path) -> list[Document]:
    """Read a corpus.

    Raises:
        ValueError: It cannot be read, is empty, or a line is not a document; in one line.
    """
    documents = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            document = {"id": str(row["id"]), "contents": row["contents"]}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: no document with id and contents ({error!r})") from error
        if not isinstance(document["contents"], str):
            raise ValueError(f"{path}:{number}: contents must be a string")
        documents.append(document)
    if not documents:
        raise ValueError(f"{path} has no documents")
    return documents


def make_app(index: SearchIndex) -> web.Application:
    """The application that answers from an index."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            queries, topk, with_scores = read_request(await request.text())
        except (BadRequestError, UnicodeDecodeError, LookupError) as error:
            return web.json_response({"error": str(error)}, status=400)
        found = [index.search(query, topk) for query in queries]
        return web.json_response({"result": [[entry(*one, with_scores=with_scores) for one in each] for each in found]})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"documents": len(index.documents)})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    app.router.add_get("/health", health)
    return app


def entry(document: Document, score: float, *, with_scores: bool) -> dict[str, Any]:
    """One hit as the answer has it."""
    return {"document": document, "score": score} if with_scores else dict(document)


def read_request(text: str) -> tuple[list[str], int, bool]:
    """The queries, how many documents each gets at most, and whether scores are wanted.

    Raises:
        BadRequestError: It is no such request.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError('the request must be an object: {"queries": ["…"], "topk": 3}')
    queries, topk, with_scores = body.get("queries"), body.get("topk"), body.get("return_scores", True)
    topk = USUAL_DOCUMENTS if topk is None else topk
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise BadRequestError("queries must be a list of strings, at least one")
    if len(queries) > MOST_QUERIES or max(map(len, queries)) > LONGEST_QUERY:
        raise BadRequestError(f"queries may be {MOST_QUERIES} at most, of {LONGEST_QUERY} characters at most")
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MOST_DOCUMENTS:
        raise BadRequestError(f"topk must be a whole number from 1 to {MOST_DOCUMENTS}, got {json.dumps(topk)[:50]}")
    if not isinstance(with_scores, bool):
        raise BadRequestError(f"return_scores must be true or false, got {json.dumps(with_scores)[:50]}")
    return queries, topk, with_scores


async def serve(app: web.Application, host: str, port: int, greeting: str) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        OSError: The address cannot be listened on.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(f"{greeting}; listening on http://{host}:{runner.addresses[0][1]}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description="BM25 search over a corpus of short documents")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="JSON Lines of id and contents")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    given = parser.parse_args(argv)
    try:
        index = SearchIndex(read_corpus(given.corpus))
        asyncio.run(serve(make_app(index), given.host, given.port, f"{len(index.documents)} documents"))
    except (ValueError, OSError, OverflowError) as error:
        print(f"search_server: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
