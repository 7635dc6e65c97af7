//! The reference's own ground: its codecs, its experts, its scales, and that it shares nothing with the library.

use crate::reference;

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
    for code in 0..0x7eu8 {
        let (low, high) = (elem::decode_e4m3(code), elem::decode_e4m3(code + 1));
        let middle = (low + high) / 2.0;
        let around = [low, middle, f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1), high];
        assert_eq!(around.map(elem::encode_e4m3), [code, code + (code & 1), code, code + 1, code + 1], "{code:#x}");
        assert_eq!(around.map(|x| elem::encode_e4m3(-x) ^ 0x80), around.map(elem::encode_e4m3));
    }
    let beyond = [464.0, 1e30, f32::INFINITY, f32::NAN, -f32::NAN, f32::MIN_POSITIVE / 2.0, -0.0];
    assert_eq!(beyond.map(elem::encode_e4m3), [0x7e, 0x7e, 0x7e, 0x7f, 0x7f, 0, 0x80]);
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
            let allowed = [
                "std::",
                "super::",
                "combine::",
                "dispatch::",
                "elem::",
                "expect::",
                "payload::",
                "quantize::",
                "report::",
                "spec::",
            ];
            assert!(import.is_none_or(|i| allowed.iter().any(|a| i.starts_with(a))), "{}: {line}", path.display());
            let foreign = ["crate::", "tokenyard", "extern ", "include!"].iter().any(|word| line.contains(word));
            assert!(!foreign, "{}: {line}", path.display());
        }
    }
    assert!(files >= 8);
}

/// The row of bf16 whose blocks begin with the numbers of one of `blocks` each; the rest is 0.
fn bf16_row(blocks: &[[f32; 3]]) -> Vec<u8> {
    let block = |first: &[f32; 3]| first.iter().copied().chain([0.0; 125]).collect::<Vec<f32>>();
    blocks.iter().flat_map(block).flat_map(|x| elem::encode_bf16(x).to_le_bytes()).collect()
}

#[test]
fn quantized_rows_follow_the_definition() {
    let huge = f32::from_bits(0x7f7f_0000);
    let row = bf16_row(&[
        [448.0, -7.0, 0.0],
        [450.0, 224.0, -0.0],
        [9.5e-5, 0.0, f32::NAN],
        [f32::INFINITY, 1.0, -1.0],
        [huge, -huge, huge / 2.0],
    ]);
    let elements = |scales: Scales| {
        let mut out = vec![0xaa; 640];
        quantized_row(scales, &row, &mut out);
        assert!(out.chunks(128).all(|block| block[3..].iter().all(|code| *code == 0)));
        out.chunks(128).map(|block| [block[0], block[1], block[2]]).collect::<Vec<[u8; 3]>>()
    };
    let words = |scales: Scales, count: usize| {
        let mut out = vec![0xaaaa_aaaa; count];
        quantized_scales(scales, &row, &mut out);
        out
    };
    // 224 * 448 / 450 is 223.004...: between 208 and 224, and nearer to 224. bf16's number at 9.5e-5 times 4.48e6 is
    // 425.6..., between 416 and 448, and nearer to 416.
    let infinite = [0x7f, 0x00, 0x80];
    let wanted = vec![[0x7e, 0xce, 0], [0x7e, 0x76, 0x80], [0x7d, 0, 0x7f], infinite, [0x7e, 0xfe, 0x76]];
    assert_eq!(elements(Scales::F32), wanted);
    let scale = |amax: f32| (amax / 448.0).to_bits();
    let wanted = [1f32.to_bits(), scale(450.0), scale(1e-4), f32::INFINITY.to_bits(), scale(huge)];
    assert_eq!(words(Scales::F32, 5), wanted);
    // 450 takes a scale of 2; the least is 2^-22, that of the largest number 2^120, and none that of infinity.
    let wanted = vec![[0x7e, 0xce, 0], [0x76, 0x6e, 0x80], [0x7c, 0, 0x7f], infinite, [0x78, 0xf8, 0x70]];
    assert_eq!(elements(Scales::Ue8m0), wanted);
    assert_eq!(words(Scales::Ue8m0, 2), [u32::from_le_bytes([127, 128, 105, 255]), 247]);
}

#[test]
fn fp8_partials_follow_the_definition() {
    let carried = |row: &[f32]| {
        let mut row = row.to_vec();
        carried_by_fp8(&mut row);
        row
    };
    let block = |first: &[f32]| [first, &vec![0.0; 128 - first.len()]].concat();
    // Scales of 1 and 2, each of its own block alone: 17 lies between 16 and 18, 18.9 nearest to 18; beside 896 all are
    // doubled, so that 2 * 8.5 becomes 16. The largest subnormals are 2^-9 apart.
    let row = [block(&[448.0, -17.0, 18.9, 0.004, -0.00097]), block(&[-896.0, 17.0, 0.004, 0.0019])].concat();
    let wanted = [block(&[448.0, -16.0, 18.0, 0.00390625, -0.0]), block(&[-896.0, 16.0, 0.00390625, 0.0])].concat();
    let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    assert_eq!(bits(&carried(&row)), bits(&wanted));
    // amax is 1e-4 at least: 1e-5 becomes 44.8, and that 44, times a scale of 1e-4 / 448.
    assert_eq!(carried(&block(&[1e-5]))[0], 44.0 * (1e-4f32 / 448.0));
    let odd = carried(&block(&[f32::NAN, 448.0, -448.0]));
    assert!(odd[0].is_nan() && odd[1..3] == [448.0, -448.0]);
    assert!(carried(&block(&[f32::INFINITY, 1.0])).iter().all(|x| x.is_nan()));
}

#[test]
fn fp8_partials_stay_within_their_bound_and_nearly_reach_it() {
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    let mut nearest = [0f64; 2];
    for round in 0..4000 {
        // amax anywhere from below 1e-4 to the largest numbers, the rest up to 2^30 below it.
        let top = 100 + round % 154;
        let number = |exponent: u32, bits: u32| f32::from_bits(exponent << 23 | bits & 0x807f_ffff);
        let mut row: Vec<f32> = (0..128).map(|_| number(top - random() % 30, random())).collect();
        let amax = row.iter().fold(1e-4f32, |most, x| most.max(x.abs()));
        let exact = row.clone();
        carried_by_fp8(&mut row);
        for (exact, seen) in exact.iter().map(|x| f64::from(*x)).zip(row) {
            let (error, bound) = ((f64::from(seen) - exact).abs(), fp8_error(exact, amax));
            assert!(error <= bound, "{exact:e} became {seen:e} beside {amax:e}: off by {error:e}, not {bound:e}");
            let small = usize::from(bound > exact.abs() / 16.0);
            nearest[small] = nearest[small].max(error / bound);
        }
    }
    // 1/17 of 1/16, and all of 2^-10 of the scale but the bound's slack.
    assert!(nearest[0] > 0.93 && nearest[1] > 0.99, "{nearest:?}");
}

/// Tokens of one rank, all of the same row, quantised.
struct Loud(Vec<u8>, Scales);

impl RowSource for Loud {
    fn row(&self, _: usize, _: usize, out: &mut [u8]) {
        quantized_row(self.1, &self.0, out);
    }
    fn scales(&self, _: usize, _: usize, out: &mut [u32]) {
        quantized_scales(self.1, &self.0, out);
    }
}

#[test]
fn flipped_scale_or_element_of_a_quantized_row_is_found() {
    // Two tokens; scales of 1, 2 and 4 for blocks of one number each, 448 times the scale.
    let row = bf16_row(&[[448.0, 0.0, 0.0], [896.0, 0.0, 0.0], [1792.0, 0.0, 0.0]]);
    let source = SourceRank { tokens: 2, topk_idx: vec![0, 0], ..Default::default() };
    let rows: Vec<u8> = (0..2 * 384).map(|c| if c % 128 == 0 { 0x7e } else { 0 }).collect();
    for scales in [Scales::F32, Scales::Ue8m0] {
        let words = match scales {
            Scales::F32 => [1f32, 2.0, 4.0].map(f32::to_bits).to_vec(),
            _ => vec![u32::from_le_bytes([127, 128, 129, 0])],
        };
        let spec = one_rank(384, scales, Layout::Contiguous { align: 1, capacity: 2 });
        let words: Vec<u8> = words.repeat(2).iter().flat_map(|word| word.to_le_bytes()).collect();
        let check = |rows: &[u8], words: &[u8]| {
            let seen = ObservedDispatch { rows, rows_pitch: 384, scales: Some(words), ..Default::default() };
            let report = check_dispatch(
                &spec,
                std::slice::from_ref(&source),
                &Loud(row.clone(), scales),
                &Faults::default(),
                0,
                &seen,
            );
            (report.mismatches, report.sentences.concat())
        };
        assert_eq!(check(&rows, &words), (0, String::new()));
        for bit in 0..8 {
            let mut flipped = rows.clone();
            flipped[384 + 128] ^= 1 << bit;
            let (mismatches, report) = check(&flipped, &words);
            assert!(mismatches == 1 && report.contains("row 1") && report.contains("column 128 is"), "{report}");
        }
        for bit in 0..words.len() * 8 {
            let mut flipped = words.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let (mismatches, report) = check(&rows, &flipped);
            assert!(mismatches == 1 && report.contains("scale word"), "bit {bit}: {report}");
        }
    }
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

/// fp8 rows on one rank of three experts.
fn one_rank(hidden: usize, scales: Scales, layout: Layout) -> Spec {
    Spec {
        ranks: 1,
        nodes: vec![1],
        hidden,
        experts: 3,
        top_k: 1,
        expert_rank: vec![0; 3],
        dtype: Elem::E4m3,
        scales,
        combine_dtype: Elem::Fp32,
        partial: Partial::Same,
        out_dtype: Elem::Fp32,
        weights: Weights::None,
        layout,
        scale_order: ScaleOrder::RowMajor,
        accumulate: false,
        zero_padding: false,
        drop_overflow: false,
        poison: 0xa5,
        duplicates: false,
        replicas: Vec::new(),
    }
}

#[test]
fn ue8m0_scales_are_read_little_end_first() {
    let spec = one_rank(640, Scales::Ue8m0, Layout::Contiguous { align: 1, capacity: 1 });
    let source = SourceRank { tokens: 1, topk_idx: vec![2], ..Default::default() };
    let mut sums = TokenSums::default();
    sums.evaluate(&spec, &source, &Ones, &Faults::default(), 0, 0);
    let scales = [0.125, 0.25, 0.5, 1.0, 8.0];
    for (i, &value) in sums.exact().iter().enumerate() {
        // Expert 2: 0.5 * (1 + (2 * 5063 & 8191) / 8192), shifted by 2 * 7919 + 1.
        let scale = scales[(i + 15839) % 640 / 128];
        assert_eq!(value, 0.5 * (1.0 + 1934.0 / 8192.0) * scale, "column {i}");
    }
}
