"""The virtual machine room: time, network, disks and random streams."""
