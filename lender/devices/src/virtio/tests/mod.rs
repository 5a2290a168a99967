mod blk;
mod hostile;
mod network;
mod registers;
mod rings;
mod world;
