"""Where a private Ray cluster has its files."""

from __future__ import annotations

from tasks.cluster import short_folder

BELOW = "/opd-ray-12345678/session_2026-11-30_13-12-54_523851_1234567/sockets/plasma_store"


def test_the_sockets_of_a_cluster_have_room_whatever_the_folder_for_temporary_files() -> None:
    assert short_folder("/scratch") == "/scratch"
    for wanted in ("/scratch/" + "a" * 16, "/scratch/" + "a" * 90):
        assert len(short_folder(wanted) + BELOW) <= 107
