//! Interrupt vectors, masks and eventfds.
