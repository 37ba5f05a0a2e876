import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.*;
import com.fasterxml.jackson.dataformat.yaml.YAMLFactory;
import io.strimzi.api.kafka.model.kafka.Kafka;
import io.strimzi.api.kafka.model.nodepool.KafkaNodePool;
import io.strimzi.api.kafka.model.user.KafkaUser;
import java.io.File;
import java.util.*;

/** Reads Strimzi's objects with Strimzi's own model, and prints each property that the model does not have. */
public class Strimzi {
  static final Map<String, Class<?>> KINDS = Map.of("Kafka", Kafka.class, "KafkaNodePool", KafkaNodePool.class, "KafkaUser", KafkaUser.class);
  static int problems = 0;

  public static void main(String[] files) throws Exception {
    var mapper = new ObjectMapper(new YAMLFactory());
    for (var file : files)
      for (MappingIterator<JsonNode> all = mapper.readerFor(JsonNode.class).readValues(new File(file)); all.hasNext();) {
        var document = all.next();
        for (var node : document.has("items") ? document.get("items") : List.of(document)) {
          var kind = node.path("kind").asText();
          try {
            check(mapper.treeToValue(node, KINDS.get(kind)), kind, Collections.newSetFromMap(new IdentityHashMap<>()));
            System.out.println("read " + kind);
          } catch (JsonProcessingException error) {
            problems++;
            System.out.println("refused " + kind + ": " + error.getOriginalMessage());
          }
        }
      }
    System.exit(problems == 0 ? 0 : 1);
  }

  static void check(Object value, String path, Set<Object> seen) throws Exception {
    if (value == null || !seen.add(value)) return;
    if (value instanceof Collection<?> items) for (var item : items) check(item, path + "[]", seen);
    if (!value.getClass().getName().startsWith("io.strimzi")) return;
    for (var method : value.getClass().getMethods()) {
      if (method.getParameterCount() != 0 || !method.getName().startsWith("get") || method.getName().equals("getClass")) continue;
      Object inner;
      try { inner = method.invoke(value); } catch (ReflectiveOperationException error) { continue; }
      if (!method.getName().equals("getAdditionalProperties")) check(inner, path + "." + method.getName().substring(3), seen);
      else if (inner instanceof Map<?, ?> unknown && !unknown.isEmpty()) {
        problems++;
        System.out.println("unknown in " + path + ": " + unknown.keySet());
      }
    }
  }
}
