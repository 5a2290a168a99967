//! Measures a borrowed device beside another one: what fio says of both, as
//! ratios, tables, plots, a report.

#![forbid(unsafe_code)]
