import java.util.HashMap;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.formats.json.JsonDeserializationSchema;
import org.apache.flink.kafka.shaded.org.apache.kafka.common.TopicPartition;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * The job of kafka_latency.py as a Flink DataStream, at defaults with object reuse: arguments bootstrap,
 * topic, partitions, records per partition, parallelism, warm-up in seconds, directory, and the topic for
 * results, if they go to one.
 */
public class KafkaLatency {
    /** A record of the topic. */
    public static class Event {
        public long key;
        public long due;
        public String page;
    }

    private static String json(Tuple3<Long, Long, Long> each) {
        return "{\"key\":" + each.f0 + ",\"n\":" + each.f1 + ",\"due\":" + each.f2 + "}";
    }

    public static void main(String[] args) throws Exception {
        Configuration configuration = new Configuration();
        configuration.setString("rest.port", "0");
        configuration.setString("pipeline.object-reuse", "true");
        StreamExecutionEnvironment env =
                StreamExecutionEnvironment.createLocalEnvironment(
                        Integer.parseInt(args[4]), configuration);
        Map<TopicPartition, Long> ends = new HashMap<>();
        for (int number = 0; number < Integer.parseInt(args[2]); number++) {
            ends.put(new TopicPartition(args[1], number), Long.parseLong(args[3]));
        }
        KafkaSource<Event> source =
                KafkaSource.<Event>builder()
                        .setBootstrapServers(args[0])
                        .setTopics(args[1])
                        .setStartingOffsets(OffsetsInitializer.earliest())
                        .setBounded(OffsetsInitializer.offsets(ends))
                        .setValueOnlyDeserializer(new JsonDeserializationSchema<>(Event.class))
                        .build();
        DataStream<Tuple3<Long, Long, Long>> counts =
                env.fromSource(source, WatermarkStrategy.noWatermarks(), "events")
                .map(event -> Tuple3.of(event.key, 1L, event.due))
                .returns(Types.TUPLE(Types.LONG, Types.LONG, Types.LONG))
                .keyBy(record -> record.f0)
                .reduce((a, b) -> Tuple3.of(a.f0, a.f1 + b.f1, b.f2));
        if (args.length > 7) {
            env.enableCheckpointing(1000);
            counts.map(each -> json(each))
                    .returns(Types.STRING)
                    .sinkTo(
                            KafkaSink.<String>builder()
                                    .setBootstrapServers(args[0])
                                    .setDeliveryGuarantee(DeliveryGuarantee.AT_LEAST_ONCE)
                                    .setRecordSerializer(
                                            KafkaRecordSerializationSchema.builder()
                                                    .setTopic(args[7])
                                                    .setValueSerializationSchema(
                                                            new SimpleStringSchema())
                                                    .build())
                                    .build());
        } else {
            counts.addSink(new Latency.Sink(Double.parseDouble(args[5]), args[6]));
        }
        env.execute("latency");
    }
}
