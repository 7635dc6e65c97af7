//! Cases: printed, read, checked.

use super::*;

#[test]
fn a_case_is_read_as_it_is_printed() {
    let case = Case {
        world: 5,
        nodes: vec![1, 4],
        link: Link::EfaP5,
        network: NetworkWord::Calm,
        nics: Some(3),
        chunk_rows: Some(2),
        double_buffer: false,
        ll_tokens: Some(9),
        round_tokens: Some(7),
        dtype: Dtype::Fp8E4m3,
        scales: ScaleKind::Ue8m0,
        quantize: true,
        partial: PartialWord::Fp8,
        layout: LayoutWord::Masked,
        capacity: Some(77),
        in_place: true,
        first_epoch: Some(u64::from(u32::MAX)),
        ragged: true,
        routing: Routing::Hot(3),
        ahead: 3,
        lockstep: true,
        fault: FaultWord::Overflow,
        world_mode: WorldMode::OneThread,
        seed: u64::MAX,
        ..Case::default()
    };
    assert_eq!(Case::parse(&case.to_string()), Ok(case));
    assert_eq!(Case::parse(""), Ok(Case::default()));
    let refused = Case::parse("world=2,mode=eager").unwrap_err().to_string();
    assert!(refused.contains("mode=eager") && refused.contains("fused, split, graph or counts"), "{refused}");
    assert!(Case::parse("color=red").is_err());
}

#[test]
fn a_field_by_its_old_name_is_refused_with_its_new_name() {
    let renamed = [("own_output", "in_place"), ("wave_tokens", "round_tokens"), ("arriving_tokens", "ll_tokens")];
    for (old, new) in renamed {
        let refused = Case::parse(&format!("world=2,{old}=1")).unwrap_err().to_string();
        assert_eq!(refused, format!("argument --replay is `{old}=1`: {old} is called {new} now"));
        assert!(Case::default().fields().iter().any(|(name, _)| *name == new), "{new}");
    }
}

#[test]
fn every_field_of_a_case_is_held_to_its_range() {
    let fields = Case::default().fields();
    for (name, usable) in &fields {
        let again = Case::parse(&format!("{name}={usable},{name}={usable}")).unwrap_err().to_string();
        assert!(again.contains(&format!("`{name}` is given more than once")), "{again}");
        let outside = ["", "-1", "1.5", "nonsense", "18446744073709551616", "99999999999999999999999999"];
        for value in outside {
            let refused = Case::parse(&format!("{name}={value}")).unwrap_err().to_string();
            assert!(refused.contains(&format!("--replay is `{name}={value}`: ")), "{refused}");
        }
        let mut taken = Vec::new();
        for value in [0, 1, 1 << 16, 1 << 20, 1 << 31, u64::from(u32::MAX) + 1, u64::MAX] {
            match Case::parse(&format!("{name}={value}")) {
                Ok(_) => taken.push(value),
                Err(refused) => assert!(refused.to_string().contains("give "), "{refused}"),
            }
        }
        let most = match *name {
            "seed" => u64::MAX,
            "first_epoch" => u64::from(u32::MAX) + 1,
            "hidden" | "chunk_rows" | "ll_tokens" | "round_tokens" | "meta_tile" | "align" | "tokens"
            | "max_tokens" | "iters" | "capacity" => 1 << 20,
            "gap" => 1 << 16,
            _ => 1,
        };
        assert!(taken.iter().all(|value| *value <= most), "{name}: {taken:?}");
        let may_be_0 = ["seed", "gap", "tokens", "ll_tokens", "none_percent", "duplicate_percent", "payload"];
        let may_be_0 = may_be_0.contains(name) || *name == "dispatch_payload";
        assert_eq!(taken.contains(&0), may_be_0, "{name}: {taken:?}");
    }
}

#[test]
fn even_placement_gives_floor_or_ceil_of_consecutive_experts() {
    let case = Case { world: 3, experts: 8, ..Case::default() };
    assert_eq!(case.expert_rank(), [0, 0, 0, 1, 1, 1, 2, 2]);
    let few = Case { world: 8, experts: 3, ..Case::default() };
    assert!(few.local_counts().iter().all(|&n| n <= 1));
}

#[test]
fn worst_case_holds_any_routing() {
    let case = Case { world: 2, experts: 8, top_k: 3, max_tokens: 5, align: 4, ..Case::default() };
    // 30 rows over 4 local experts: at worst each wastes 3 of its last block, in whole blocks.
    assert_eq!(case.capacity(), 40);
    assert_eq!(Case { layout: LayoutWord::Token, align: 1, ..case.clone() }.capacity(), 10);
    assert_eq!(Case { layout: LayoutWord::Masked, align: 1, ..case.clone() }.capacity(), 10);
    // One expert a rank, twice a token.
    let repeated = Case { experts: 2, align: 1, top_k: 2, duplicate_percent: Some(0), ..case };
    let rows = [LayoutWord::Contiguous, LayoutWord::Masked, LayoutWord::Token]
        .map(|layout| Case { layout, ..repeated.clone() }.capacity());
    assert_eq!(rows, [20, 20, 10]);
    assert_eq!(Case { duplicate_percent: None, ..repeated }.capacity(), 10);
}

#[test]
fn unusable_shapes_name_the_option_and_what_would_do() {
    let base = Case { world: 2, ..Case::default() };
    let fp8 = Case { dtype: Dtype::Fp8E4m3, scales: ScaleKind::F32, ..base.clone() };
    for (case, wanted) in [
        (Case { hidden: 100, ..base.clone() }, "--hidden is `100`"),
        (Case { hidden: 192, ..fp8.clone() }, "give a multiple of 128, say 256"),
        (Case { hidden: 192, partial: PartialWord::Fp8, ..base.clone() }, "fp8 partial rows have a scale"),
        (Case { top_k: 9, ..base.clone() }, "--top-k is `9`: give 1 to 8"),
        (Case { scales: ScaleKind::F32, ..base.clone() }, "--scales is `f32`"),
        (Case { mode: Mode::Graph, ragged: true, ..base.clone() }, "device_count is `no`"),
        (Case { quantize: true, ..base.clone() }, "--quantize is `given`: it makes fp8 rows"),
        (Case { quantize: true, scales: ScaleKind::None, ..fp8.clone() }, "--quantize is `given`"),
        (Case { experts: 5000, ..base.clone() }, "--experts is `5000`"),
        (Case { tokens: 4, ..base.clone() }, "--max-tokens is `1`: give at least 4"),
        (
            Case { duplicate_percent: Some(0), top_k: 3, max_tokens: 1 << 19, ..base.clone() },
            "--max-tokens is `524288`: with duplicates give at most 349525, for top-3",
        ),
        (Case { layout: LayoutWord::Token, weights: WeightsWord::Combine, ..base.clone() }, "--weights is `combine`"),
        (Case { layout: LayoutWord::Masked, align: 8, ..base.clone() }, "--align is `8`"),
        (Case { max_tokens: 1 << 30, ..base.clone() }, "--max-tokens is `1073741824`"),
        (Case { align: 1 << 30, max_tokens: 9, ..base.clone() }, "--align is `1073741824`"),
        (Case { capacity: Some(0), ..base.clone() }, "--capacity is `0`"),
        (
            Case { layout: LayoutWord::Masked, experts: 3000, max_tokens: 1 << 20, ..base.clone() },
            "--max-tokens is `1048576`: row numbers have 32 bits",
        ),
        (Case { world: 65, ..base.clone() }, "--ranks-per-node is `65`: give at most 64 nodes of at most 64"),
        (Case { nodes: vec![1, 2], ..base.clone() }, "--ranks-per-node is `1,2`: the nodes sum to 3"),
        (Case { nodes: vec![2, 0], ..base.clone() }, "--ranks-per-node is `2,0`"),
        (Case { nics: Some(5), ..base.clone() }, "nics is `5`: give 1 to 4"),
        (Case { link: Link::Cx7, ..base.clone() }, "--link is `cx7`"),
        (Case { ahead: 0, ..base.clone() }, "ahead is `0`"),
        (Case { routing: Routing::Hot(9), ..base.clone() }, "--routing is `hot:9`"),
    ] {
        let refused = case.check().unwrap_err().to_string();
        assert!(refused.contains(wanted), "{refused}");
    }
    assert!(base.check().is_ok() && fp8.check().is_ok() && Case { quantize: true, ..fp8 }.check().is_ok());
    let inter_node = Case { nodes: vec![1, 1], link: Link::Cx7, max_tokens: 2047, ..base };
    let chunked = Case { chunk_rows: Some(2), ..inter_node.clone() };
    assert!(inter_node.check().is_ok() && Case { chunk_rows: Some(3), ..inter_node }.check().is_ok());
    let refused = chunked.check().unwrap_err().to_string();
    assert!(refused.contains("--chunk-rows is `2`") && refused.contains("at least 3"), "{refused}");
}
