//! The reference's own ground: its codecs, its experts, its scales, and that it shares nothing with the library.

mod reference;

use reference::elem::{self, Elem};
use reference::*;

#[test]
fn codecs_round_to_nearest_even_at_every_midpoint() {
    for (elem, infinity) in [(Elem::Bf16, 0x7f80u32), (Elem::Fp16, 0x7c00)] {
        for bits in 0..infinity {
            let (low, high) = (elem.decode(bits), f64::from(elem.decode(bits + 1)));
            assert_eq!((elem.encode(low), elem.encode(-low)), (bits, bits | 0x8000));
            // The step above the largest value is as wide as the one below it.
            let step = || f64::from(low) - f64::from(elem.decode(bits - 1));
            let high = if high.is_finite() { high } else { f64::from(low) + step() };
            let middle = ((f64::from(low) + high) / 2.0) as f32;
            assert_eq!(elem.encode(middle), bits + (bits & 1), "{elem:?} {bits:#x}");
            assert_eq!(elem.encode(f32::from_bits(middle.to_bits() - 1)), bits, "{elem:?} {bits:#x}");
            assert_eq!(elem.encode(f32::from_bits(middle.to_bits() + 1)), bits + 1, "{elem:?} {bits:#x}");
            assert_eq!(elem.round(middle), elem.decode(elem.encode(middle)));
        }
        assert_eq!((elem.encode(f32::INFINITY), elem.encode(f32::NAN)), (infinity, 0x7fff));
    }
    let known = [(0x00, 0.0), (0x01, 0.001953125), (0x08, 0.015625), (0x38, 1.0), (0x7e, 448.0), (0xc4, -3.0)];
    assert!(known.iter().all(|&(code, value)| elem::decode_e4m3(code) == value));
    assert!(elem::decode_e4m3(0x7f).is_nan() && elem::decode_e4m3(0xff).is_nan());
    assert_eq!((elem::decode_ue8m0(127), elem::decode_ue8m0(0)), (1.0, f32::from_bits(1 << 22)));
}

#[test]
fn experts_are_all_different() {
    let mut factors: Vec<u32> = (0..8192).map(|e| expert::factor(e).to_bits()).collect();
    assert!((0..8192).all(|e| (0.5..2.0).contains(&expert::factor(e).abs())));
    factors.sort_unstable();
    factors.dedup();
    assert_eq!(factors.len(), 8192);
    for hidden in [16, 128, 2880, 4096, 6144, 7168] {
        let mut shifts: Vec<usize> = (0..hidden).map(|e| expert::shift(e, hidden)).collect();
        shifts.sort_unstable();
        assert_eq!(shifts, (0..hidden).collect::<Vec<_>>());
    }
}

#[test]
fn reference_imports_nothing_but_std() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        files += 1;
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            let import = line.strip_prefix("pub use ").or(line.strip_prefix("use "));
            let allowed = ["std::", "super::", "combine::", "dispatch::", "elem::", "expect::", "report::", "spec::"];
            assert!(import.is_none_or(|i| allowed.iter().any(|a| i.starts_with(a))), "{}: {line}", path.display());
            let foreign = ["crate::", "tokenyard", "extern ", "include!"].iter().any(|word| line.contains(word));
            assert!(!foreign, "{}: {line}", path.display());
        }
    }
    assert!(files >= 8);
}

/// Rows of ones, so that a combined element shows the scale that was applied.
struct Ones;

impl RowSource for Ones {
    fn row(&self, _: usize, _: usize, out: &mut [u8]) {
        out.fill(0x38);
    }
    fn scales(&self, _: usize, _: usize, out: &mut [u32]) {
        out.copy_from_slice(&[u32::from_le_bytes([124, 125, 126, 127]), 130]);
    }
}

#[test]
fn ue8m0_scales_are_read_little_end_first() {
    let spec = Spec {
        ranks: 1,
        nodes: vec![1],
        hidden: 640,
        experts: 3,
        top_k: 1,
        expert_rank: vec![0; 3],
        dtype: Elem::E4m3,
        scales: Scales::Ue8m0,
        combine_dtype: Elem::Fp32,
        partial_f32: false,
        out_dtype: Elem::Fp32,
        weights: Weights::None,
        layout: Layout::Contiguous { align: 1, capacity: 1 },
        scale_order: ScaleOrder::RowMajor,
        accumulate: false,
        zero_padding: false,
        poison: 0xa5,
    };
    let source = SourceRank { tokens: 1, topk_idx: vec![2], topk_weight: Vec::new() };
    let mut sums = TokenSums::default();
    sums.evaluate(&spec, &source, &Ones, &Faults::default(), 0, 0);
    let scales = [0.125, 0.25, 0.5, 1.0, 8.0];
    for (i, &value) in sums.exact().iter().enumerate() {
        // Expert 2: 0.5 * (1 + (2 * 5063 & 8191) / 8192), shifted by 2 * 7919 + 1.
        let scale = scales[(i + 15839) % 640 / 128];
        assert_eq!(value, 0.5 * (1.0 + 1934.0 / 8192.0) * scale, "column {i}");
    }
}
