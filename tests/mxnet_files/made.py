"""Graphs that the layers can say, each with something that is easily read wrongly."""

from tests.mxnet_files.graphs import Written


def windows():
    """Pooling of all kinds side by side, of 9x9 images."""
    made, names = Written(), []
    kinds = (
        {"kernel": "(3, 3)", "stride": "(2, 2)", "pool_type": "max"},
        {"kernel": "(2,2)", "stride": "(2,2)", "pad": "(1, 1)", "pool_type": "avg", "pooling_convention": "valid"},
        {"kernel": "[3, 3]", "stride": "(2, 2)", "pad": "(1, 1)", "pool_type": "avg", "count_include_pad": "False"},
        {"kernel": "(3, 2)", "stride": "(2, 2)", "pad": "(1, 1)", "cudnn_off": "1"},
        {"kernel": "(2, 2)", "stride": "(2, 2)", "pool_type": "avg", "pooling_convention": "full"},
    )
    for number, options in enumerate(kinds):
        made.node("Pooling", f"pool{number}", "data", **options)
        made.node("Pooling", f"end{number}", f"pool{number}", kernel="(1, 1)", global_pool="True", pool_type="avg")
        names.append(f"end{number}")
    made.node("Pooling", "most", "data", kernel="(7, 7)", global_pool="True", pool_type="max")
    return made.node("concat", "all", *names, "most", num_args=6).dense("fc", "all", 10)


def shared():
    """A concatenation whose middle inputs share a branch, and a sum of three, one of which is the input itself."""
    made = Written().convolution("conv", "data", 4, "(3, 3)", pad="(1, 1)", no_bias="False")
    made.norm("bn", "conv", fix_gamma="False", eps="2e-5").node("relu", "act", "bn")
    made.convolution("one", "act", 2).convolution("stem", "act", 3, "(1, 3)", pad="(0, 1)", stride="(1, 1)")
    made.convolution("left", "stem", 2, num_group="1").node("Activation", "end", "stem", act_type="tanh")
    made.node("Concat", "joined", "one", "left", "end", "act", num_args="4", dim="1")
    made.node("_mul_scalar", "scaled", "joined", scalar="0.17").node("clip", "clipped", "joined", a_min="-1", a_max="6")
    made.node("add_n", "sum", "joined", "scaled", "clipped", num_args="3").node("_div_scalar", "third", "sum", scalar=3)
    made.node("Cast", "cast", "third", dtype="float64").node("identity", "same", "cast").norm("fixed", "same")
    made.node("Dropout", "drop", "fixed", p="0.3").node("Reshape", "flat", "drop", shape="(0, -1)")
    made.dense("fc", "flat", 10, flatten="True").node("Activation", "squashed", "fc", act_type="tanh")
    return made.node("elemwise_add", "twice", "squashed", "fc").node("SoftmaxOutput", "softmax", "twice", "label")


def gluon():
    """As gluon exports: other names for nodes and for statistics, a branch that is only its input, and no softmax."""
    options = {"kernel": "(3, 3)", "num_filter": 3, "no_bias": "True", "layout": "NCHW", "dilate": "(1, 1)"}
    made = Written().node("Convolution", "net0_conv0_fwd", "data", "net0_conv0_weight", pad="(1, 1)", **options)
    arrays = [f"net0_batchnorm0_{kind}" for kind in ("gamma", "beta", "running_mean", "running_var")]
    made.node("BatchNorm", "net0_batchnorm0_fwd", "net0_conv0_fwd", *arrays, axis="1", fix_gamma="False")
    made.node("broadcast_add", "sum", "net0_batchnorm0_fwd", "data").node("flatten", "flat", "sum")
    return made.node("FullyConnected", "last_fwd", "flat", "w", "b", num_hidden="10")


def response():
    made = Written().node("LRN", "lrn", "data", nsize="3", alpha="0.1", beta="0.5", knorm="1").node("tanh", "t", "lrn")
    return made.dense("fc", "t", 10)


def transformed():
    made = Written().dense("loc", "data", 6)
    options = {"target_shape": "(5, 4)", "transform_type": "affine", "sampler_type": "bilinear"}
    return made.node("SpatialTransformer", "stn", "data", "loc", **options).dense("fc", "stn", 10)


def crossing():
    """a -> c, a and b -> d: no tree."""
    made = Written().convolution("a", "data", 2).convolution("b", "data", 2)
    made.node("elemwise_add", "d", "a", "b").convolution("c", "a", 2)
    return made.node("Concat", "end", "c", "d").dense("fc", "end", 10)


def not_neighbours():
    made = Written().convolution("stem", "data", 2).convolution("a", "stem", 2).convolution("b", "data", 2)
    return made.convolution("c", "stem", 2).node("Concat", "end", "a", "b", "c").dense("fc", "end", 10)


def nested(depth):
    """data + relu(data + relu(data + ...)): each sum is a branch of the next one."""
    made = Written().node("relu", "r0", "data")
    for level in range(depth):
        made.node("elemwise_add", f"a{level}", f"r{level}", "data").node("relu", f"r{level + 1}", f"a{level}")
    return made.dense("fc", f"r{depth}", 10)


def long(count):
    made = Written().node("relu", "r0", "data")
    for number in range(count):
        made.node("elemwise_add", f"a{number}", f"r{number}", f"r{number}").node("relu", f"r{number + 1}", f"a{number}")
    return made.dense("fc", f"r{count}", 10)


def tangled(count):
    """A sum of two ends that lie `count` nodes apart, one of them `count` times: a square of steps between them."""
    made = Written().node("relu", "r0", "data")
    for number in range(count):
        made.node("relu", f"r{number + 1}", f"r{number}")
    return made.node("add_n", "end", "r0", *[f"r{count}"] * count)
