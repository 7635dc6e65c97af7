//! An in-place output that differs from the context's own.

use super::*;

#[test]
fn an_output_in_place_that_differs_in_one_field_is_refused() {
    const ROWS: usize = 8;
    let world = World::threads(1).unwrap().remove(0);
    let device = test_device(&world);
    let builder = rig::builder(&world, &device).hidden(128).format(RowFormat::FP8_F32);
    let ep = builder.tuning(|tuning| tuning.in_place = Some((ROWS, 1))).build().unwrap();
    let (stream, memory) = (device.new_stream().unwrap(), Memory::new(&device));
    memory.own.fill(0).unwrap();
    let own = ep.in_place().unwrap();
    assert_eq!(fields_of(&own), BTreeSet::from(["layout", "pitch_bytes", "rows", "scales"].map(str::to_owned)));
    let tokens = Tokens::new(memory.view(0, 128, 16), memory.view(1, 8, 4), TokenCount::Host(1));
    let tokens = tokens.topk_weight(memory.view(2, 8, 4)).scales(ScaleView::new(memory.view(3, 4, 4), 4, 4));
    memory.own.write(SLOT + 4, &[0i32, 1].map(i32::to_ne_bytes).concat()).unwrap();
    let scales = own.scales.clone().unwrap();
    let good = Output::new(own.layout, own.rows.clone(), memory.view(4, 4 * rig::EXPERTS, 4)).scales(scales.clone());
    let later = |view: &View, bytes: usize| view.slice(bytes, view.len() - bytes).unwrap();
    let others = [
        ("another capacity", good.clone().layout(Layout::Contiguous { align: 1, capacity: ROWS - 1 })),
        ("another alignment", good.clone().layout(Layout::Contiguous { align: 2, capacity: ROWS })),
        ("another layout", good.clone().layout(Layout::Token { capacity: ROWS })),
        ("rows elsewhere", good.clone().rows(memory.view(5, ROWS * 128, 16))),
        ("rows further on", good.clone().rows(later(&own.rows, 128))),
        ("another pitch", good.clone().pitch_bytes(own.pitch_bytes + 16)),
        ("no scales", good.clone().scales(None)),
        ("scales further on", good.clone().scales(later(&scales, 4))),
        ("scales by column", good.clone().scale_order(ScaleOrder::ColumnMajor)),
    ];
    let mut problems = Vec::new();
    for (what, output) in others {
        let given = format!("{:?} at {:#x}", output.layout, output.rows.ptr());
        let advice = "this context has in-place output; give the output that in_place() returns".to_owned();
        let outcome = ep.dispatch(&stream, &tokens, &output).map(drop).map_err(|error| refusal(&error));
        if outcome != Err(("output", given, advice)) {
            problems.push(format!("{what}: {outcome:?}"));
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
    for (name, output, bytes) in [
        ("rows", good.clone().rows(own.rows.slice(0, own.rows.len() - 1).unwrap()), own.rows.len()),
        ("output scales", good.clone().scales(scales.slice(0, scales.len() - 1).unwrap()), scales.len()),
    ] {
        let outcome = ep.dispatch(&stream, &tokens, &output).map(drop).map_err(|error| refusal(&error));
        let expected = (name, format!("{} bytes", bytes - 1), format!("{bytes} bytes are needed"));
        assert_eq!(outcome, Err(expected));
    }
    ep.dispatch(&stream, &tokens, &good.pitch_bytes(own.pitch_bytes)).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    ep.check().unwrap();
    let mut counts = [0; 8];
    memory.own.read(4 * SLOT + 4, &mut counts).unwrap();
    assert_eq!(counts.to_vec(), [1i32, 1].map(i32::to_ne_bytes).concat());
}
