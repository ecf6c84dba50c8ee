"""Caption or extract many photos part by part, on one machine or on a Ray cluster. An interrupted job goes on."""
