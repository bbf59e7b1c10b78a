"""Serves server reflection under both of its names: v1, which newer tools ask for first, and v1alpha.

The two differ only in the package's name. grpcio-reflection has v1alpha only, so its service answers both, and the
descriptors of v1 are those of v1alpha under the other name.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

SERVICE_V1 = "grpc.reflection.v1.ServerReflection"
SERVICES = (reflection.SERVICE_NAME, SERVICE_V1)
_FILE_V1 = "grpc/reflection/v1/reflection.proto"


def add(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds both reflection services to a server. names: all services that the server shows, with these two."""
    describe_v1()
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # not in __all__
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(SERVICE_V1, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((generic,))


def describe_v1() -> FileDescriptor:
    """Adds the description of v1 itself to the pool of all descriptions, since tools ask for it."""
    pool = descriptor_pool.Default()  # type: ignore[no-untyped-call]
    try:
        return pool.FindFileByName(_FILE_V1)
    except KeyError:
        file = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        file.name, file.package = _FILE_V1, SERVICE_V1.rpartition(".")[0]
        for message in file.message_type:
            for field in (each for each in message.field if each.type_name):
                field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
        for service in file.service:
            for method in service.method:
                method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
                method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
        pool.AddSerializedFile(file.SerializeToString())
        return pool.FindFileByName(_FILE_V1)
