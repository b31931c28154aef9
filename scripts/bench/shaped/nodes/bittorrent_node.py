"""libtorrent 2.1 with a v2 torrent over TCP (uTP behind NAT); every peer knows all others. Options: piece_kib, utp.

`is_finished` is set before the bytes are on the disk, so a receiver is done when the cache is flushed.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import libtorrent as lt
from marks import description, mark, wait_for_go


def make_torrent(node: SimpleNamespace) -> Path:
    """Write the torrent into the shared folder, once."""
    torrent = Path(node.shared) / f"file-{node.options['piece_kib']}.torrent"
    if not torrent.exists():
        entry = lt.create_file_entry("out.bin", node.size)
        made = lt.create_torrent([entry], node.options["piece_kib"] << 10, lt.create_torrent_flags_t.v2_only)
        Path("out.bin").symlink_to(node.file)
        lt.set_piece_hashes(made, ".")
        torrent.write_bytes(lt.bencode(made.generate()))
    return torrent


def open_session(node: SimpleNamespace) -> lt.session:
    settings = {
        "listen_interfaces": f"0.0.0.0:{node.port}",
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "connections_limit": 200,
        "unchoke_slots_limit": 200,
        "active_limit": -1,
        "alert_mask": lt.alert.category_t.error_notification | lt.alert.category_t.storage_notification,
    }
    unwanted = "tcp" if node.options.get("utp") else "utp"
    settings |= {f"enable_outgoing_{unwanted}": False, f"enable_incoming_{unwanted}": False}
    return lt.session(settings)


def add(session: lt.session, torrent: Path, folder: str, flags: int = 0) -> lt.torrent_handle:
    wanted = lt.add_torrent_params()
    wanted.ti = lt.torrent_info(str(torrent))
    wanted.save_path = folder
    wanted.flags = (wanted.flags | flags) & ~lt.torrent_flags.auto_managed & ~lt.torrent_flags.paused
    return session.add_torrent(wanted)


def serve(node: SimpleNamespace) -> None:
    torrent = make_torrent(node)
    session = open_session(node)
    handle = add(session, torrent, ".", lt.torrent_flags.seed_mode)
    while not handle.status().is_seeding:
        time.sleep(0.01)
    mark("ready")
    while True:
        time.sleep(1)


def receive(node: SimpleNamespace) -> None:
    session = open_session(node)
    mark("ready")
    wait_for_go(node)
    handle = add(session, make_torrent(node), str(Path(node.out).parent))
    for address in (node.origin, *node.receivers):
        if address != node.address:
            handle.connect_peer((address, node.port))
    while not handle.status().is_finished:
        time.sleep(0.01)
    handle.flush_cache()
    while not any(isinstance(alert, lt.cache_flushed_alert) for alert in session.pop_alerts()):
        session.wait_for_alert(50)
    mark("done")
    while True:
        time.sleep(1)


if __name__ == "__main__":
    node = description()
    serve(node) if node.role == "origin" else receive(node)
