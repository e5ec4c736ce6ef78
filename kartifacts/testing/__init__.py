"""For tests of kartifacts and of what is built on it: a real mirror that fails to order, and small real repositories.

A repository on disk, a mirror in front of it, and a fault::

    from kartifacts.testing import Mirror, faults, tiny_repository

    repository = tiny_repository(tmp_path / "repository", {"a.cubin": b"first", "b.so": b"second"})
    with Mirror(repository.path) as mirror:
        mirror.order(faults.flip(at=3), times=2)            # the next two answers have one wrong byte
        settings = kartifacts.config.read(overrides={"mirrors": mirror.url, "store": str(tmp_path / "store")})
        ...
        assert len(mirror.requests) == 3                    # two bad answers, one good one

`Mirror` is a threaded HTTP/1.1 server on 127.0.0.1 with keep-alive, ranges and ETags.  An order holds for requests
whose path contains its `match`, after the first `skip` of them, `times` times (None: for ever); the oldest order that
applies is carried out.  `mirror.requests` is what was really asked, `mirror.connections` how often somebody connected.
With an `ssl.SSLContext` it speaks TLS; as a proxy it gives what it holds, and carries CONNECT to `mirror.tunnel_to`.
"""

from __future__ import annotations

from kartifacts.testing import faults
from kartifacts.testing.mirror import Mirror, Request
from kartifacts.testing.repository import TinyRepository, tiny_repository

__all__ = ["Mirror", "Request", "TinyRepository", "faults", "tiny_repository"]
