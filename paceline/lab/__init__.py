"""The lab: a real cluster on one machine, out of network namespaces, shaped links and processor quotas."""

from paceline.lab.cluster import Cluster, Event, Link, Site, Worker
from paceline.lab.file import example_files, find_cluster, read_cluster
from paceline.lab.lab import Lab
from paceline.lab.remains import clean, only_lab
from paceline.lab.report import EventReport, Report, WorkerReport
from paceline.lab.runner import run_workers

__all__ = [
    "Cluster",
    "Event",
    "EventReport",
    "Lab",
    "Link",
    "Report",
    "Site",
    "Worker",
    "WorkerReport",
    "clean",
    "example_files",
    "find_cluster",
    "only_lab",
    "read_cluster",
    "run_workers",
]
