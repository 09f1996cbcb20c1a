"""Opening an LMDB store: what is refused, and what is shared."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest
from lmdb_desk import ids, job

from tidemill.brokers.registry import open_broker
from tidemill.errors import BrokerUnavailable, InvalidOption, TidemillError


def test_another_format_is_refused(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    broker = open_broker(url)
    broker.put([job()])
    broker.close()
    with (
        lmdb.open(f"{tmp_path}/store", max_dbs=20, lib_version=0) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(b"tidemill-=format", (99).to_bytes(8, "big"))
    with pytest.raises(BrokerUnavailable, match=r"format 99.*format 1"):
        open_broker(url)
    with pytest.raises(BrokerUnavailable):  # and says so again: nothing was left open
        open_broker(url)


NETWORK = ["nfs4", "cifs", "9p", "virtiofs", "lustre", "ceph", "fuse.ceph", "fuse.ceph-fuse"]
NETWORK += ["glusterfs", "fuse.glusterfs", "fuse.s3fs", "fuse.mountpoint-s3", "fuse.sshfs"]


@pytest.mark.parametrize(
    ("mount", "kind", "refused"),
    [
        *(("", kind, True) for kind in NETWORK),
        ("/store", "nfs4", True),
        *((mount, "nfs4", False) for mount in ("/store/deep", "/sto", "/other")),
        ("", "ext4", False),
    ],
)
def test_network_file_systems_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, kind: str, refused: bool
) -> None:
    base = tmp_path / "a b"
    mounts = tmp_path / "mounts"
    escaped = str(base).replace(" ", "\\040") + mount
    mounts.write_text(f"overlay / overlay rw 0 0\nserver:/x {escaped} {kind} rw 0 0\n")
    monkeypatch.setattr("tidemill.brokers.lmdb.engine.environment._MOUNTS", str(mounts))
    url = f"lmdb://{base}/store"
    if refused:
        with pytest.raises(BrokerUnavailable, match=rf"network file system \({kind}\)"):
            open_broker(url)
    else:
        open_broker(url).close()


def test_the_same_directory_opened_twice_is_shared(tmp_path: Path) -> None:
    # case Q12
    one = open_broker(f"lmdb://{tmp_path}/store")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    two = open_broker(f"lmdb://{tmp_path}/link")
    one.put([job(id="a")])
    assert two.get("a") is not None
    with pytest.raises(InvalidOption, match=r"durability"):
        open_broker(f"lmdb://{tmp_path}/store?durability=relaxed")
    one.close()
    two.put([job(id="b")])
    with pytest.raises(TidemillError, match=r"closed"):
        one.put([job()])
    two.close()
    again = open_broker(f"lmdb://{tmp_path}/store")
    assert ids(again) == {"a", "b"}
    again.close()


@pytest.mark.parametrize(
    "url", ["lmdb://", "lmdb:///x?durability=no", "lmdb:///x?map_size=5", "lmdb:///x?mapsize=5"]
)
def test_wrong_urls_are_refused_with_a_sentence(url: str) -> None:
    # case Q17
    with pytest.raises(InvalidOption):
        open_broker(url)


def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerUnavailable, match=r"file/store as a store: .*; name a folder"):
        open_broker(f"lmdb://{tmp_path}/file/store")
