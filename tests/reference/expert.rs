//! The functions that stand in for experts. They are all different, so that swapped experts cannot pass unseen.
//!
//! This is the one place that documents the formulas; a kernel that computes them follows it.
//!
//! Expert e (global id) maps the dequantised row x, H columns, to
//!
//! ```text
//! y[i]  =  round_c( a_e ·₃₂ x[(i + r_e) mod H] )          c: the combine dtype, nearest, ties to even
//! x[j]  =  value[j] ·₃₂ scale[j / 128]                    ·₃₂: one f32 multiplication; without scales x = value
//! a_e   =  (e odd ? −1 : 1) · (e & 2 ? 0.5 : 1) · (1 + ((e · 5063) & 8191) / 8192)
//! r_e   =  (e · 7919 + 1) mod H                           in 32-bit unsigned arithmetic
//! ```
//!
//! 5063 is odd, so the magnitudes 1 + n/8192 are distinct for 8192 experts in a row, halved ones too; with 14
//! significant bits a_e is exact in f32. 7919 is prime, so the shifts of H experts in a row are distinct unless 7919
//! divides H.
//!
//! In the token layout an expert rank returns, for each row it received, the sum over that token's local experts in
//! top-k order, with the terms not rounded one by one:
//!
//! ```text
//! acc = 0;  for k: acc = fmaf(w_k, a_e ·₃₂ x[(i + r_e) mod H], acc);  row[i] = round_c(acc)
//! ```
//!
//! w_k is the dispatched weight, or 1 where no weights are given.

/// Factor of expert `e`.
pub fn factor(e: usize) -> f32 {
    let sign = if e & 1 == 1 { -1.0f32 } else { 1.0 };
    let half = if e & 2 == 2 { 0.5f32 } else { 1.0 };
    sign * half * (1.0 + (e.wrapping_mul(5063) & 8191) as f32 / 8192.0)
}

/// Shift of expert `e` in rows of `hidden` columns.
pub fn shift(e: usize, hidden: usize) -> usize {
    (e * 7919 + 1) % hidden.max(1)
}

/// a_e · x[(i + r_e) mod H], one f32 multiplication, not rounded further.
pub fn product(e: usize, x: &[f32], i: usize) -> f32 {
    factor(e) * x[(i + shift(e, x.len())) % x.len()]
}
